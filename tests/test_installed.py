"""The command `nebula`, extras, and what a wheel holds."""

import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile

import children
import pytest

from nebula_jax import __main__ as command
from nebula_jax import errors, installed

ROOT = pathlib.Path(__file__).parents[1]


def nebula(folder, *arguments):
    """Runs `nebula` in a folder, as the program that pip makes does."""
    program = "import sys; from nebula_jax.__main__ import main; sys.exit(main())"
    return children.python(
        "-c",
        program,
        *arguments,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def namesakes(tmp_path):
    """A user's folder, with packages of their own that have our folders' names."""
    for name in ("experiments", "scripts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('theirs')")
    return tmp_path


def test_nebula_runs_our_module_where_the_user_has_folders_of_the_same_names(namesakes):
    """So does a process that it starts; without a module it is a federation's."""
    done = nebula(namesakes, "--help")
    assert "switch" in done.stdout, done.stderr
    assert "experiments.pretrain_m3" in done.stdout
    program = (
        "import subprocess, sys; from nebula_jax import __main__ as command;"
        " command._search_ours_first(); sys.exit(subprocess.call([sys.executable, '-m',"
        " 'scripts.issue_certificates', '--out=tls', '--clusters=a']))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = children.python("-c", program, cwd=namesakes, env=environment)
    assert done.returncode == 0, done.stderr
    assert (namesakes / "tls" / "a").is_dir()


def test_a_module_that_is_not_there_is_named_with_those_that_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nebula", "experiments.pretrain_m4"])
    assert command.main() == 2
    told = capsys.readouterr().err
    assert "pretrain_m4" in told
    assert "experiments.pretrain_m3" in told
    assert "experiments.fields" not in told


def test_a_command_without_its_extra_names_it_in_a_line(monkeypatch, capsys):
    def run(module, **_):
        assert module == "experiments.translate"
        with installed.extra("experiments"):
            import no_such_library  # noqa: F401

    monkeypatch.setattr(runpy, "run_module", run)
    monkeypatch.setattr(command, "_search_ours_first", lambda: None)
    monkeypatch.setattr(sys, "argv", ["nebula", "experiments.translate"])
    assert command.main() == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert 'no_such_library is missing: pip install "nebula_jax[experiments]"' in told


def test_a_missing_extra_is_an_import_error_and_one_of_ours():
    with pytest.raises(ModuleNotFoundError) as caught, installed.extra("plots"):
        import no_such_library.inner  # noqa: F401
    assert isinstance(caught.value, errors.NebulaError)


def test_a_module_of_ours_that_is_missing_is_no_missing_extra():
    with pytest.raises(ModuleNotFoundError) as caught, installed.extra("plots"):
        import nebula_jax.no_such_module  # noqa: F401
    assert not isinstance(caught.value, installed.MissingExtra)


FOR_A_CHECKOUT = ("experiments/results/", "scripts/make_tables.py")
SPLIT = "experiments.split_your_model"
BLOCKED = (
    *("array_record", "django", "grain", "importlib_resources", "matplotlib", "polib"),
    *("sacrebleu", "safetensors", "sentencepiece", "tensorflow_datasets"),
    "tokenizers",
)
"""Libraries that extras bring."""
ROOMS_OF_EXTRAS = {
    "data.packed_text",
    *("evaluation.bleu", "evaluation.sentence_scores"),
}
"""Modules that are of no use without them."""
IMPORTER = f"""
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert "nebula_jax[" in str(error), (name, error)
        print(name)
"""


def test_the_library_needs_no_extra():
    """What fails without them names the extra, and is on the list."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "nebula_jax").rglob("*.py"))
        if path.name != "__init__.py"
    ]
    more = ["scripts.nebula", SPLIT]
    done = children.python("-c", IMPORTER, *names, *more, cwd=ROOT, check=True)
    assert set(done.stdout.split()) == {
        f"nebula_jax.{name}" for name in ROOMS_OF_EXTRAS
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel")
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target=wheel"]
    subprocess.run([*build, f"--directory={out}"], cwd=ROOT, check=True)
    with zipfile.ZipFile(*out.glob("*.whl")) as opened:
        yield opened


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The folder of an empty environment into which pip has put the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=True)
    pip = [folder / "venv/bin/python", "-m", "pip", "--disable-pip-version-check"]
    probe = [*pip, "download", "--quiet", "--no-deps", "--retries=0", "--timeout=5"]
    dest = f"--dest={folder / 'probe'}"
    if subprocess.run([*probe, dest, "absl-py"], capture_output=True).returncode:
        pytest.skip("the package index cannot be reached from here")
    subprocess.run([*pip, "install", "--quiet", wheel.filename], check=True)
    return folder / "venv"


def own(environment, folder, *command):
    """Runs a program of the environment; returns what it printed."""
    program, *arguments = command
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON")
    }
    done = subprocess.run(
        [environment / "bin" / program, *arguments],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_wheel_trains_a_split_beside_a_users_own_scripts(
    environment, namesakes
):
    (site,) = environment.glob("lib/*/site-packages")
    claimed = {path.name for path in site.iterdir() if "nebula" in path.name.lower()}
    assert {name for name in claimed if not name.endswith(".dist-info")} == {
        "nebula_jax"
    }
    assert not [name for name in ("experiments", "scripts") if (site / name).exists()]
    assert not [name for name in BLOCKED if (site / name).exists()]

    theirs = namesakes / "mine" / "scripts"
    theirs.mkdir(parents=True)
    (theirs / "train.py").write_text("print('theirs')")
    assert own(environment, theirs.parent, "python", "-m", "scripts.train") == (
        "theirs\n"
    )
    example = ROOT / f"{SPLIT.replace('.', '/')}.py"
    shutil.copyfile(example, namesakes / "my_split.py")
    for program, script in (("nebula", SPLIT), ("python", "my_split.py")):
        flags = (f"--workdir={program}", "--steps=8")
        told = own(environment, namesakes, program, script, *flags)
        assert f"report: {program}/summary.json" in told
        summary = json.loads((namesakes / program / "summary.json").read_text())
        assert [each["last_step"] for each in summary["clusters"]] == [8, 8]


def tracked(*patterns):
    """Files of the checkout, those that are new included."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    found = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True)
    return {each for each in found.stdout.splitlines() if (ROOT / each).is_file()}


def test_the_wheel_claims_one_name(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {each for each in tops if not each.endswith(".dist-info")} == {"nebula_jax"}


def test_the_wheel_has_all_code_flagfiles_and_json_and_no_records(wheel):
    wanted = tracked("*.py", "*.flags", "*.json", "*.typed")
    ours = ("nebula_jax/", "experiments/", "scripts/")
    wanted = {each for each in wanted if each.startswith(ours)}
    wanted = {
        each if each.startswith("nebula_jax/") else f"nebula_jax/bundled/{each}"
        for each in wanted
        if not each.startswith(FOR_A_CHECKOUT)
    }
    names = set(wheel.namelist())
    assert wanted <= names
    assert "nebula_jax/py.typed" in names
    others = names - wanted
    assert not [name for name in others if name.endswith((".py", ".json", ".pyc"))]


def test_a_wheel_leaves_nothing_behind(wheel):
    git = ["git", "status", "--porcelain", "--ignored", "--", "build", "dist"]
    left = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    assert not left.stdout


def test_the_page_of_the_wheel_has_no_links_that_break(wheel):
    (metadata,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    text = wheel.read(metadata).decode()
    links = [part.partition(")")[0] for part in text.split("](")[1:]]
    assert links
    assert all(link.startswith("https://") for link in links)
