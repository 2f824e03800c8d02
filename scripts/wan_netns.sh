#!/usr/bin/env bash
# scripts/wan_netns.sh RATE -- CMD_A... -- CMD_B...
#
# Runs two commands in network namespaces of their own, joined by one line of the given
# rate each way: a token bucket in the kernel, so that TCP behaves as on a real slow line
# (no delay is added). RATE is such as 60mbit (kbit, mbit, gbit), or none.
#
#   scripts/wan_netns.sh 60mbit -- iperf3 -s -1 -- sh -c 'sleep 1; iperf3 -c $WAN_A'
#
# Both commands find the two addresses in WAN_A (10.77.0.1) and WAN_B (10.77.0.2). They
# start at once, so whoever connects has to try again; standard input is empty. CMD_A
# ends at the first --, CMD_B may hold more of them.
#
# Exit status: that of the first command that failed (the other is then ended), else 0;
# 2 for wrong usage, 1 where it cannot run, 128 + n after signal n. However it ends, kill
# -9 included, the kernel ends the commands and removes the line. Needs Linux, root,
# iproute2, util-linux and bash 5.1.
set -euo pipefail

GRACE_SECONDS=5 # for a command to end by itself before it is killed
export WAN_A=10.77.0.1 WAN_B=10.77.0.2

fail() {
  echo "scripts/wan_netns.sh: $2" >&2
  exit "$1"
}

usage() {
  echo "usage: scripts/wan_netns.sh RATE -- CMD_A... -- CMD_B...   (RATE: 60mbit, or none)" >&2
  exit 2
}

# The arguments -> rate, a, b.
parse() {
  [ $# -ge 2 ] && [ "$2" = -- ] || usage
  rate="$1" a=()
  shift 2
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    a+=("$1")
    shift
  done
  b=("${@:2}")
  [ ${#a[@]} -gt 0 ] && [ ${#b[@]} -gt 0 ] || usage
  local number='^[0-9]+(\.[0-9]+)?[kmg]bit$' zero='^[0.]+[kmg]'
  [ "$rate" = none ] || [[ $rate =~ $number && ! $rate =~ $zero ]] ||
    fail 2 "RATE is '$rate'; write such as 60mbit, 1.5gbit, 500kbit, or none"
}

check() {
  local tool
  for tool in ip tc; do
    command -v "$tool" >/dev/null || fail 1 "$tool is missing (on Debian: apt install iproute2)"
  done
  for tool in unshare nsenter setpriv; do
    command -v "$tool" >/dev/null || fail 1 "$tool is missing (on Debian: apt install util-linux)"
  done
  [ "$EUID" -eq 0 ] || fail 1 "only root can make network namespaces"
  for tool in "${a[0]}" "${b[0]}"; do
    command -v "$tool" >/dev/null || fail 127 "there is no command $tool"
  done
}

# Runs `inside` and waits. Two links of a chain make it end with this process, whatever
# ends this process: setpriv has the kernel kill unshare, unshare has it kill its child.
outside() {
  local signal inner
  # In a process group of its own, so that Ctrl-C reaches it through us alone.
  set -m
  # The middle command sees to it that we have not died before setpriv had its say.
  setpriv --pdeathsig KILL bash -c '[ "$PPID" = "$1" ] && shift && exec "$@"' - $$ \
    unshare --net --pid --kill-child --mount-proc \
    bash "${BASH_SOURCE[0]}" --inside "$@" </dev/null &
  inner=$!
  for signal in INT TERM HUP; do
    trap "stop $inner $signal" "$signal"
  done
  wait "$inner"
}

stop() {
  trap - INT TERM HUP # the second one ends all at once
  # To the group, because unshare itself does not listen while its child lives.
  kill -TERM -- "-$1" 2>/dev/null || true
  wait "$1" || true
  exit $((128 + $(kill -l "$2")))
}

# Process 1 of a process namespace, in the network namespace of side A. When it ends, the
# kernel kills all others in here, and with the last one the line is gone.
inside() {
  local ready other first asked='' status=0
  # Process 1 is not sent what it does not listen to.
  trap 'asked=yes' TERM
  exec {ready}< <(exec unshare --net sh -c 'echo; exec sleep infinity')
  other=$! # keeps the network namespace of side B
  read -ru "$ready" || fail 1 "no second network namespace"
  join_with "$other"
  set -m # both in groups of their own: they are told to end once, by end_both
  "${a[@]}" </dev/null {ready}<&- &
  a_pid=$!
  nsenter --net="/proc/$other/ns/net" -- "${b[@]}" </dev/null {ready}<&- &
  b_pid=$!
  trap end_both TERM
  [ -z "$asked" ] || end_both
  wait -n -p first "$a_pid" "$b_pid" || status=$?
  if [ "$status" -ne 0 ]; then
    end_both
  elif [ "$first" = "$a_pid" ]; then
    wait "$b_pid" || status=$?
  else
    wait "$a_pid" || status=$?
  fi
  exit "$status"
}

# One end of the line here, one in the network namespace of process $1.
join_with() {
  local there=(nsenter "--net=/proc/$1/ns/net" --)
  ip link add wan type veth peer name wan netns "$1"
  ip address add "$WAN_A/24" dev wan
  "${there[@]}" ip address add "$WAN_B/24" dev wan
  if [ "$rate" != none ]; then
    tc qdisc add dev wan root tbf rate "$rate" burst 32kb latency 50ms
    "${there[@]}" tc qdisc add dev wan root tbf rate "$rate" burst 32kb latency 50ms
  fi
  ip link set lo up
  ip link set wan up
  "${there[@]}" ip link set lo up
  "${there[@]}" ip link set wan up
}

end_both() {
  trap '' TERM
  kill -TERM "$a_pid" "$b_pid" 2>/dev/null || true
  { sleep "$GRACE_SECONDS" && kill -KILL "$a_pid" "$b_pid" 2>/dev/null; } &
  wait "$a_pid" "$b_pid" 2>/dev/null || true
}

if [ "${1:-}" = --inside ]; then
  parse "${@:2}"
  inside
else
  parse "$@"
  check
  outside "$@"
fi
