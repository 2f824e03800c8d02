"""The recipes for Slurm and Kubernetes: legal, and so are their flags."""

import json
import pathlib
import re
import shlex
import subprocess
import tomllib
import types

import configured
import nebula_command
import numpy as np
import pytest
import yaml

from experiments.m3 import config
from nebula_jax.runtime import connect
from nebula_jax.runtime.ranks import rendezvous
from nebula_jax.runtime.records import progress
from nebula_jax.security import names
from nebula_jax.security.membership import member, site_folder
from nebula_jax.training import metrics
from scripts import nebula

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
SBATCH = sorted((SCRIPTS / "slurm").glob("*.sbatch"))
SWITCH = SCRIPTS / "k8s" / "switch.yaml"
YAML = sorted(set((SCRIPTS / "k8s").glob("*.yaml")) - {SWITCH})
DIRECT = re.compile("^# (?=REACH=)", re.MULTILINE)
"""The line to uncomment for connections without a switch."""


def arguments_of(words, start):
    """The flags of a command line of pretrain_m3, without start and flagfile."""
    count = len(start)
    assert words[:count] == start
    folder, name = pathlib.Path("experiments/flags"), words[count].partition("=")[2]
    assert (SCRIPTS.parent / folder / pathlib.Path(name).name).is_file()
    return words[count + 1 :]


def program(folder, name, text):
    """A script that stands for a program."""
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def submit(path, folder):
    """Runs a job as Slurm does, with a folder's programs before the system's."""
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run(
        ["bash", path], env=environment, cwd=SCRIPTS.parent, timeout=20
    )


@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
def test_a_slurm_script_is_legal_and_so_are_its_flags(path, tmp_path):
    text = path.read_text()
    options = re.findall(r"^#SBATCH --([a-z-]+)(=\S+)?", text, re.MULTILINE)
    assert {"job-name", "nodes", "ntasks-per-node", "signal"} <= {
        name for name, _ in options
    }
    printed = tmp_path / "printed"
    keep = f'printf "%s\\n" "$@" > {printed}\n'
    keep += f'printf "%s" "$NEBULA_CLUSTER_KEY" >> {tmp_path}/keys'
    program(tmp_path, "srun", keep)

    def run_of(job):
        """What a job gives to `srun`, as a run."""
        assert submit(job, tmp_path).returncode == 0
        words = printed.read_text().splitlines()
        start = ["scripts/run", "python", "-m", "experiments.pretrain_m3"]
        return configured.run(config, *arguments_of(words, start))

    for _ in range(2):
        run = run_of(path)
    assert run.local.cluster.partition(":")[0] == path.stem
    assert run.local.processes().coordinator == "auto"
    assert run.local.federation
    assert run.local.peer.startswith("lab-")
    assert run.local.listen == connect.Settings.listen  # see `inner.own_host`
    keys = (tmp_path / "keys").read_text()
    assert re.fullmatch("[0-9a-f]{128}", keys)  # two, of which each run makes its own
    assert keys[:64] != keys[64:]
    direct = tmp_path / "direct.sbatch"
    text, count = DIRECT.subn("", text)
    assert count == 1
    direct.write_text(text)
    run = run_of(direct)
    assert not run.local.federation
    assert run.local.tls == f"credentials/{names.label(run.local.cluster)}"


@pytest.mark.parametrize(
    ("statuses", "starts", "last"),
    [([4, 0], 2, 0), ([137, 139, 4, 0], 4, 0), ([1], 1, 1), ([2], 1, 2)],
)
def test_a_slurm_script_starts_again_what_died_and_not_what_refused(
    tmp_path, statuses, starts, last
):
    count = tmp_path / "count"
    count.write_text("")
    begun = f"echo >> {count}\nstatuses=({' '.join(map(str, statuses))})"
    program(tmp_path, "srun", f"{begun}\nexit ${{statuses[$(wc -l < {count}) - 1]}}")
    program(tmp_path, "sleep", "")
    assert submit(SBATCH[0], tmp_path).returncode == last
    assert len(count.read_text()) == starts


@pytest.mark.parametrize("during", ["srun", "sleep"])
def test_a_slurm_script_that_is_to_stop_starts_nothing_again(during, tmp_path):
    """Not after a step that ends because the others stop too, nor after the sleep."""
    stop = {"srun": "", "sleep": "", during: "kill -TERM $PPID"}
    if during == "srun":  # until the signal is passed on
        stop["srun"] = "trap 'exit 4' TERM\nkill -TERM $PPID\nwhile :; do :; done"
    for name, then in stop.items():
        count = tmp_path / f"{name}-count"
        count.write_text("")
        # A second one would end well.
        once = f"echo >> {count}\n[[ $(wc -l < {count}) == 1 ]] || exit 0"
        program(tmp_path, name, f"{once}\n{then}\nexit 4")
    assert submit(SBATCH[0], tmp_path).returncode == 4
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
    command, *given = *container["command"], *container["args"]
    assert command == "nebula"
    parsed = nebula.parser().parse_args(given)
    assert (parsed.listen, str(parsed.federation)) == ("0.0.0.0:7070", "/federation")


def test_neither_the_switch_nor_trainers_of_a_cluster_see_the_others_keys(tmp_path):
    """On the disk that the commands in the recipe have made of a lab's folder."""
    lab = nebula_command.Lab(tmp_path / "federation")
    made = re.findall("^#     ((?:mkdir|mv|cp) .*)", SWITCH.read_text(), re.MULTILINE)
    subprocess.run(["bash", "-ec", "\n".join(made)], cwd=tmp_path, check=True)
    lab.folder.running_switch.touch()

    def seen(path):
        """The secrets in what a pod has mounted, and where."""
        *_, job = yaml.safe_load_all(path.read_text())
        pod = job["spec"]["template"]["spec"]
        claims = {
            each["name"]: each["persistentVolumeClaim"]["claimName"]
            for each in pod["volumes"]
        }
        return {
            (each["mountPath"], secret.name)
            for each in pod["containers"][0]["volumeMounts"]
            if claims[each["name"]] == "nebula-federation"
            for secret in (tmp_path / each.get("subPath", "")).rglob("*.*")
            if secret.suffix == ".pem" or secret == lab.folder.running_switch
        }

    trainers = {("/federation", "trainer.pem"), ("/federation/inside", "switch.json")}
    for path in YAML:
        assert seen(path) == trainers
    names = ("switch.pem", "key.pem", "authority.pem", "root.pem", "switch.json")
    assert seen(SWITCH) == {("/federation", name) for name in names}
    own = site_folder.Folder(tmp_path / "trainers")
    assert member.load(own, "trainer")
    assert own.inside.is_dir()


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_a_kubernetes_job_is_legal_and_so_are_its_flags(path):
    found = list(yaml.safe_load_all(path.read_text()))
    (job,) = (each for each in found if each["kind"] == "Job")
    names = {each["metadata"]["name"] for each in found if each["kind"] == "Service"}
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    index, cache, key = container["env"]
    assert cache["value"].startswith("/data/")  # the image has no home of this user
    assert key["name"] == rendezvous.SECRET_VARIABLE
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
    assert_confined(spec["template"]["spec"])
    words = [word.replace(f"$({index['name']})", "1") for word in words]
    assert not re.search(r"\$\(", " ".join(words))
    # The image of scripts/containers, where the package has its own flagfiles.
    start = ["nebula", "experiments.pretrain_m3"]
    run = configured.run(config, *arguments_of(words, start))
    assert run.local.listen == connect.Settings.listen
    assert (run.local.federation, run.local.peer[:4]) == ("/federation", "lab-")
    processes = run.local.processes()
    assert processes.num_processes == spec["completions"] == spec["parallelism"]
    assert processes.process_id == 1
    host = processes.coordinator.partition(":")[0]
    assert host == f"{job['metadata']['name']}-0.{job['metadata']['name']}"
    assert spec["template"]["spec"]["subdomain"] in names
    assert json.dumps(job)  # nothing that YAML alone can express
    assert shlex.join(words)


CONTAINERS = SCRIPTS / "containers"
COMPOSE = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())["services"]


def commands_of(service):
    """The commands of `nebula` in a service's script, as words."""
    (script,) = service["command"]
    lines = [line.partition("nebula ")[2] for line in script.splitlines()]
    return [shlex.split(line) for line in lines if line]


@pytest.mark.parametrize("name", ["discriminator", "generator"])
def test_a_composed_cluster_shapes_its_line_and_its_flags_are_legal(name):
    service = COMPOSE[name]
    script = service["command"][0]
    assert "tc qdisc replace dev eth0 root netem rate 60mbit delay 15ms" in script
    assert service["cap_add"] == ["NET_ADMIN"]
    subprocess.run(["sh", "-n", "-c", script], check=True)
    ((module, flagfile, *flags),) = commands_of(service)
    assert module == "experiments.pretrain_m3"
    path = SCRIPTS.parent / "experiments" / "flags" / flagfile.partition("=")[2]
    run = configured.run(config, f"--flagfile={path}", *flags)
    assert run.local.cluster.partition(":")[0] == name
    assert run.local.tls == f"/shared/credentials/{names.label(run.local.cluster)}"
    prepared = COMPOSE["prepare"]["command"][0]
    assert run.local.cluster in prepared
    assert str(run.local.vocabulary) in prepared
    assert run.local.metrics_port == "0.0.0.0:9400"
    if name == "generator":
        assert run.local.peer == "discriminator:7070"
        assert configured.run(
            config, *commands_of(COMPOSE["discriminator"])[0][2:]
        ).local.listen.endswith(":7070")


def test_what_is_composed_is_there():
    for service in COMPOSE.values():
        assert set(service.get("depends_on", ())) <= set(COMPOSE)
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (CONTAINERS / source).is_file()
        if build := service.get("build"):
            assert (CONTAINERS / build["context"]).resolve() == SCRIPTS.parent
            assert (SCRIPTS.parent / build["dockerfile"]).is_file()
    scraped = yaml.safe_load((CONTAINERS / "prometheus.yaml").read_text())
    (job,) = scraped["scrape_configs"]
    (targets,) = [each["targets"] for each in job["static_configs"]]
    assert {each.partition(":")[0] for each in targets} <= set(COMPOSE)


def test_an_image_has_the_files_and_extras_that_it_names():
    text = (CONTAINERS / "Containerfile").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((SCRIPTS.parent / each).exists() for each in line.split())
    project = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text())["project"]
    named = ",".join(re.findall(r"EXTRAS=([\w,]+)", text)).split(",")
    assert set(named) <= set(project["optional-dependencies"])


def test_the_dashboard_shows_metrics_that_clusters_have(tmp_path):
    board = json.loads((CONTAINERS / "grafana" / "nebula.json").read_text())
    shown = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"nebula_(\w+)", target["expr"])
    }
    peer = types.SimpleNamespace(cluster="d")
    link = types.SimpleNamespace(
        peer=peer, waited=0.0, round_trip=0.01, bytes_moved=lambda direction: 1
    )
    record = progress.Progress(tmp_path, "g", 0, 2, 1, links=[link])
    record.step(1, {"loss": np.float32(1.0), "tokens": np.int32(3)})
    record.finish(1, {})
    assert shown <= metrics.read(tmp_path / "g")[0].keys()
    sources = yaml.safe_load((CONTAINERS / "grafana" / "sources.yaml").read_text())
    (source,) = sources["datasources"]
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
