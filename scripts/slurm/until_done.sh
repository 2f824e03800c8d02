# What the jobs beside this file run: their CLUSTER of the M3 run of FLAGFILE, which
# reaches the others by REACH, until it is done, refuses or is to stop.
set -uo pipefail

# By this secret its processes know each other; `srun` passes it on.
NEBULA_CLUSTER_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export NEBULA_CLUSTER_KEY

stopping= step=
trap 'stopping=1; kill -TERM "$step" 2>/dev/null' TERM

run() {
  srun scripts/run python -m experiments.pretrain_m3 --flagfile="$FLAGFILE" \
    --workdir=runs/m3 --vocabulary=shared.model "${CLUSTER[@]}" "${REACH[@]}" \
    --coordinator=auto &
  step=$!
  [[ $stopping ]] && kill -TERM $step # it came before there was a step to send it to
  wait $step
  status=$?
  while kill -0 $step 2>/dev/null; do # a trap ends a wait early
    wait $step
    status=$?
  done
  return $status
}

# 4: another cluster is missing. 137, 139: a process was killed.
until run; do
  status=$?
  [[ $status == 4 || $status == 137 || $status == 139 ]] || exit $status
  [[ $stopping ]] || sleep 2
  [[ ! $stopping ]] || exit $status # also if TERM came during the sleep
done
