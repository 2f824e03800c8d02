"""The recipes for Slurm and Kubernetes: legal, and so are their flags."""

import json
import pathlib
import re
import shlex
import subprocess

import configured
import pytest
import yaml

from experiments.m3 import config
from nebula_jax.runtime.ranks import run_secret
from nebula_jax.security import names
from scripts import nebula

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
SBATCH = sorted((SCRIPTS / "slurm").glob("*.sbatch"))
SWITCH = SCRIPTS / "k8s" / "switch.yaml"
YAML = sorted(set((SCRIPTS / "k8s").glob("*.yaml")) - {SWITCH})
DIRECT = re.compile("^# (?=REACH=)", re.MULTILINE)
"""The line to uncomment for connections without a switch."""
COMMAND = ["scripts/run", "python", "-m", "experiments.pretrain_m3"]


def arguments_of(words):
    """The flags of a command line of pretrain_m3, without its flagfile."""
    assert words[: len(COMMAND)] == COMMAND
    flagfile, *rest = words[len(COMMAND) :]
    name = flagfile.partition("=")[2]
    assert (SCRIPTS.parent / name).is_file()
    return rest


@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
def test_a_slurm_script_is_legal_and_so_are_its_flags(path, tmp_path):
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    options = re.findall(r"^#SBATCH --([a-z-]+)(=\S+)?", text, re.MULTILINE)
    assert {"job-name", "nodes", "ntasks-per-node", "signal"} <= {
        name for name, _ in options
    }
    # What is run is what a `srun` in the path is given.
    fake = tmp_path / "srun"
    printed = tmp_path / "printed"
    fake.write_text(
        f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" > {printed}\n'
        f'printf "%s" "$NEBULA_CLUSTER_KEY" >> {tmp_path}/keys\n'
    )
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", path], check=True, env=environment, timeout=20)
    run = configured.run(config, *arguments_of(printed.read_text().splitlines()))
    assert run.local.cluster.partition(":")[0] == path.stem
    assert run.local.processes().coordinator == "auto"
    assert run.local.federation
    assert run.local.peer.startswith("lab-")
    subprocess.run(["bash", path], check=True, env=environment, timeout=20)
    keys = (tmp_path / "keys").read_text()
    assert re.fullmatch("[0-9a-f]{128}", keys)  # two, of which each run makes its own
    assert keys[:64] != keys[64:]
    direct = tmp_path / "direct.sbatch"
    text, count = DIRECT.subn("", text)
    assert count == 1
    direct.write_text(text)
    subprocess.run(["bash", direct], check=True, env=environment, timeout=20)
    run = configured.run(config, *arguments_of(printed.read_text().splitlines()))
    assert not run.local.federation
    assert run.local.tls == f"credentials/{names.label(run.local.cluster)}"


@pytest.mark.parametrize(
    ("statuses", "starts", "last"),
    [([4, 0], 2, 0), ([137, 139, 4, 0], 4, 0), ([1], 1, 1), ([2], 1, 2)],
)
def test_a_slurm_script_starts_again_what_died_and_not_what_refused(
    tmp_path, statuses, starts, last
):
    fake, count = tmp_path / "srun", tmp_path / "count"
    count.write_text("")
    fake.write_text(
        "#!/usr/bin/env bash\n"
        f"echo >> {count}\n"
        f"statuses=({' '.join(map(str, statuses))})\n"
        f"exit ${{statuses[$(wc -l < {count}) - 1]}}\n"
    )
    fake.chmod(0o755)
    sleep = tmp_path / "sleep"
    sleep.write_text("#!/usr/bin/env bash\n")
    sleep.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", SBATCH[0]], env=environment, timeout=20)
    assert done.returncode == last
    assert len(count.read_text()) == starts


@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
@pytest.mark.parametrize("during", ["srun", "sleep"])
def test_a_slurm_script_that_is_to_stop_starts_nothing_again(path, during, tmp_path):
    """Not after a step that ends because the others stop too, nor after the sleep."""
    stop = {"srun": "", "sleep": "", during: "kill -TERM $PPID"}
    if during == "srun":  # until the signal is passed on
        stop["srun"] = "trap 'exit 4' TERM\nkill -TERM $PPID\nwhile :; do :; done"
    for name, then in stop.items():
        fake, count = tmp_path / name, tmp_path / f"{name}-count"
        count.write_text("")
        # A second one would end well.
        fake.write_text(
            f"#!/usr/bin/env bash\necho >> {count}\n"
            f"[[ $(wc -l < {count}) == 1 ]] || exit 0\n{then}\nexit 4\n"
        )
        fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", path], env=environment, timeout=20)
    assert done.returncode == 4
    assert len((tmp_path / "srun-count").read_text()) == 1


def assert_confined(pod):
    """No root, no more rights than the image has, no token, no moving image."""
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    for each in pod["containers"]:
        rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert each["securityContext"] == rights
        assert not each["image"].endswith((":latest", "/nebula-jax"))


def test_the_switch_alone_is_reached_from_outside_and_by_trainers():
    documents = []
    for path in [SWITCH, *YAML]:
        documents += yaml.safe_load_all(path.read_text())
    services = [each for each in documents if each["kind"] == "Service"]
    (outside,) = (each for each in services if "type" in each["spec"])
    assert outside["metadata"]["name"] == "nebula-switch"
    service, policy, deployment = yaml.safe_load_all(SWITCH.read_text())
    assert service["spec"]["ports"] == [{"port": 7070}]
    others, trainers = policy["spec"]["ingress"]
    assert others == {"ports": [{"port": 7070}]}
    pod = deployment["spec"]["template"]
    (label,) = trainers["from"]
    jobs = [each for each in documents if each["kind"] == "Job"]
    for each in jobs:
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert labels == label["podSelector"]["matchLabels"]
    assert trainers["ports"] == [{"port": 7080}]
    assert pod["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
    assert_confined(pod["spec"])
    (container,) = pod["spec"]["containers"]
    command, *given = container["command"][1:], *container["args"]
    assert command[0] == "nebula"
    parsed = nebula.parser().parse_args([*command[1:], *given])
    assert (parsed.listen, str(parsed.federation)) == ("0.0.0.0:7070", "/federation")


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_a_kubernetes_job_is_legal_and_so_are_its_flags(path):
    found = list(yaml.safe_load_all(path.read_text()))
    (job,) = (each for each in found if each["kind"] == "Job")
    names = {each["metadata"]["name"] for each in found if each["kind"] == "Service"}
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    *addresses, index, key = container["env"]
    assert key["name"] == run_secret.VARIABLE
    name = job["metadata"]["name"]
    assert key["valueFrom"] == {"secretKeyRef": {"name": name, "key": "cluster.key"}}
    (policy,) = (each["spec"] for each in found if each["kind"] == "NetworkPolicy")
    own = {"matchLabels": {"job-name": name}}
    assert policy["podSelector"] == own
    assert policy["policyTypes"] == ["Ingress"]
    # Nobody outside; the switch reaches who listens.
    (ingress,) = policy["ingress"]
    listens = path.stem == "discriminator"
    switch = {"matchLabels": {"app": "nebula-switch"}}
    among = [own, switch] if listens else [own]
    assert ingress == {"from": [{"podSelector": each} for each in among]}
    assert [each["name"] for each in addresses] == ["POD_IP"] * listens
    assert_confined(spec["template"]["spec"])
    words = [word.replace("$(POD_IP)", "10.0.0.7") for word in words]
    words = [word.replace(f"$({index['name']})", "1") for word in words]
    assert not re.search(r"\$\(", " ".join(words))
    run = configured.run(config, *arguments_of(words))
    assert (run.local.federation, run.local.peer[:4]) == ("/federation", "lab-")
    processes = run.local.processes()
    assert processes.num_processes == spec["completions"] == spec["parallelism"]
    assert processes.process_id == 1
    host = processes.coordinator.partition(":")[0]
    assert host == f"{job['metadata']['name']}-0.{job['metadata']['name']}"
    assert spec["template"]["spec"]["subdomain"] in names
    assert json.dumps(job)  # nothing that YAML alone can express
    assert shlex.join(words)
