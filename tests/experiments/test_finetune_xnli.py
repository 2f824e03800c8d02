"""The real command on invented pairs: goes on after a kill, tests any folder."""

import json
import pathlib
import shutil

import configured
import huggingface_hub
import numpy as np
import psutil
import pytest
import safetensors.numpy
import tiny_nli
import tiny_runs
import trees
from absl.testing import flagsaver

from experiments import finetune_xnli
from experiments.xnli import config, evaluate
from nebula_jax import errors
from nebula_jax.data import nli
from nebula_jax.models import pretrained
from nebula_jax.training import checkpoint

# In every run of the tests: M3's whole runs, and steps of XNLI's (xnli/test_train.py).
pytestmark = pytest.mark.slow

STEPS = 24


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tiny_nli.Finetunings(tmp_path_factory.mktemp("xnli"))


@pytest.fixture(scope="module")
def undisturbed(runs):
    """What a run that was never stopped said; its folder is `undisturbed`."""
    return runs.finished(workdir="undisturbed", steps=STEPS)


def test_a_run_ends_bit_for_bit_the_same_through_all_kinds_of_faults(runs, undisturbed):
    """A disk that fails, a process that stands still and is killed."""
    failing = "EIO:fsync:finetune/checkpoints/00000003.partial"
    status, output = runs.run(workdir="killed", steps=STEPS, failing=failing)
    assert status == 1
    assert "could not save step 3 in killed/finetune/checkpoints" in output
    assert output.strip().splitlines()[-1].endswith("Input/output error")
    process, _ = runs.start_and_wait("killed", 6, ["finetune"], steps=STEPS)
    tiny_runs.pause(psutil.Process(process.pid), 0.5)
    process.kill()
    process.communicate()
    output = runs.finished(workdir="killed", steps=STEPS)
    assert "going on after step" in output
    runs.assert_same("killed", "undisturbed", ["finetune"], STEPS)
    ours, theirs = (
        json.loads((runs.folder / name / "summary.json").read_text())
        for name in ("killed", "undisturbed")
    )
    for key in ("dev", "selected_step", "test"):
        assert ours[key] == theirs[key]
    assert predictions(runs.folder / "killed") == predictions(
        runs.folder / "undisturbed"
    )


@pytest.mark.usefixtures("signals")
def test_a_run_that_was_killed_while_it_tested_has_the_seconds_of_its_training(
    runs, undisturbed, here
):
    shutil.copytree(runs.folder / "undisturbed", runs.folder / "untested")
    path = runs.folder / "untested" / "summary.json"
    before = json.loads(path.read_text())
    path.unlink()
    trained = runs.folder / "untested" / "finetune" / "summary.json"
    about = json.loads(trained.read_text()) | {"seconds": 5000.0}
    trained.write_text(json.dumps(about))
    use(runs, workdir="untested", steps=STEPS)
    assert finetune_xnli.main() == 0
    after = json.loads(path.read_text())
    assert after["test"] == before["test"]
    assert after["seconds"] == 5000.0  # this command has taken fewer


def predictions(folder):
    """Language -> the lines of its file."""
    return {
        path.name: path.read_text().splitlines()
        for path in (folder / "predictions").glob("*.tsv")
    }


def test_a_run_says_what_it_did(runs, undisturbed):
    folder = runs.folder / "undisturbed"
    summary = json.loads((folder / "summary.json").read_text())
    assert [each["step"] for each in summary["dev"]] == [4, 8, 12, 16, 20, 24]
    best = max(each["accuracy"] for each in summary["dev"])
    first = next(each for each in summary["dev"] if each["accuracy"] == best)
    assert summary["selected_step"] == first["step"]
    assert summary["text"]["labels"]["train"] == {
        "en": {"entailment": 32, "neutral": 32, "contradiction": 32}
    }
    test = summary["test"]
    assert list(test["accuracy"]) == ["en", "de", "sw"]
    assert test["average"] == pytest.approx(np.mean(list(test["accuracy"].values())))
    files = predictions(folder)
    assert files.keys() == {"test.en.tsv", "test.de.tsv", "test.sw.tsv"}
    for language in ("en", "de", "sw"):
        header, *rows = (line.split("\t") for line in files[f"test.{language}.tsv"])
        assert header == ["id", "label", "prediction", *nli.LABELS]
        assert len(rows) == tiny_nli.SIZES["test"]
        hits = [label == prediction for _, label, prediction, *_ in rows]
        assert np.mean(hits) == pytest.approx(test["accuracy"][language])
    for warning in test["warnings"]:
        assert f"warning: {warning}" in undisturbed
    page = (folder / "report.html").read_text("utf-8")
    for words in ("<svg", "English dev", "--learning_rate", "until the first step"):
        assert words in page
    assert "41 of 44 pieces are kept" in undisturbed


def test_on_dev_no_test_row_is_read(runs, undisturbed, tested):
    """A recipe may be chosen by it."""
    text = runs.folder / "without_test"
    shutil.copytree(runs.text, text)
    for path in (text / "nli").glob("test.*"):
        path.unlink()
    by_dev = configured.run(config, **runs.flags(), split="dev")
    by_dev = by_dev.with_local(data_dir=text)
    assert evaluate.wanted(by_dev) == {"train": ["en"], "dev": ["en", "de", "sw"]}
    assert tested("undisturbed", split="dev", data_dir="without_test") == 0
    (out,) = (runs.folder / "undisturbed" / "evaluated").glob("dev-*")
    found = json.loads((out / "summary.json").read_text())
    curve = json.loads((runs.folder / "undisturbed" / "summary.json").read_text())
    (own,) = (each for each in curve["dev"] if each["step"] == found["selected_step"])
    assert found["dev"]["accuracy"]["en"] == pytest.approx(own["accuracy"])
    names = {path.name for path in out.glob("*.tsv")}
    assert names == {"dev.en.tsv", "dev.de.tsv", "dev.sw.tsv"}


def table(output):
    """The lines of the printed table."""
    return [line for line in output.splitlines() if line.startswith("|")]


def use(runs, **values):
    """Flags as the command line sets them; relative to the runs' folder."""
    given = runs.flags() | {"devices_per_cluster": 0} | values
    configured.parse(config, **given)


@pytest.fixture
def here(runs, monkeypatch):
    """The runs' folder; flags are as they were afterwards."""
    monkeypatch.chdir(runs.folder)
    with flagsaver.flagsaver():
        yield pathlib.Path()


@pytest.fixture
def tested(runs, here, monkeypatch):
    """Runs --eval_only in this process, on the run of a folder."""

    def test(folder, **values):
        given = [f"--{name}={value}" for name, value in values.items()]
        argv = ["finetune_xnli", "--devices_per_cluster=0", *given]
        monkeypatch.setattr("sys.argv", argv)
        use(runs, eval_only="true", run=folder, **values)
        return finetune_xnli.main()

    return test


def test_eval_only_prints_the_runs_own_table_for_the_same_folder(
    runs, undisturbed, tested, capsys
):
    assert tested("undisturbed", export="true") == 0
    assert len(table(undisturbed)) == 6
    assert table(capsys.readouterr().out) == table(undisturbed)
    left = runs.folder / "undisturbed" / "finetune" / "encoder"
    about = json.loads((left / "config.json").read_text())
    assert about["id2label"]["2"] == nli.LABELS[2]
    card = huggingface_hub.ModelCard.load(left / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    assert "began with bert, and was fine-tuned for" in card.text
    (folder,) = (runs.folder / "undisturbed" / "evaluated").glob("test-*")
    for name, lines in predictions(runs.folder / "undisturbed").items():
        assert (folder / name).read_text().splitlines() == lines


def test_eval_only_tests_another_folder_with_the_runs_own_settings(
    runs, undisturbed, tested
):
    """Fewer languages, fewer pairs, and a word that training did not have."""
    folder = runs.folder / "other"
    for language, file in nli.paths(runs.text, "test", ["en", "sw"]).items():
        lines = file.read_text().splitlines()
        path = folder / "nli" / f"test.{language}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = lines[7].split("\t")
        fields[2] += " zzz"
        path.write_text(
            "".join(f"{line}\n" for line in [*lines[:7], "\t".join(fields)])
        )
    with pytest.raises(errors.NebulaError, match="no test pairs in de"):
        tested("undisturbed", data_dir="other")
    assert tested("undisturbed", data_dir="other", languages="en,sw") == 0
    (found,) = (
        each.parent
        for each in (runs.folder / "undisturbed" / "evaluated").rglob("test.sw.tsv")
        if not (each.parent / "test.de.tsv").exists()
    )
    for name, lines in predictions(runs.folder / "undisturbed").items():
        if (found / name).exists():
            again = (found / name).read_text().splitlines()
            assert len(again) == 8
            assert again[:7] == lines[:7]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"length_buckets": "32,16"}, "must ascend"),
        ({"length_buckets": "a"}, "expected numbers"),
        ({"length_buckets": "16,32"}, "models/bert has 16 positions"),
        ({"languages": "en,en"}, "each once"),
        ({"data_dir": "package:django"}, "no package has such pairs"),
        ({"data_dir": "nowhere"}, "there is no such folder"),
        ({"encoder": "no-such-model"}, "no-such-model: no such model"),
        ({"run": "undisturbed"}, "go together"),
        ({"eval_only": "true"}, "--run is missing: the folder of a run of"),
        ({"eval_only": "true", "run": "text"}, "no run of finetune_xnli is there"),
    ],
)
def test_bad_flags_are_one_clear_error(runs, here, values, words):
    use(runs, **({"workdir": "bad"} | values))
    with pytest.raises(errors.NebulaError) as error:
        finetune_xnli.main()
    assert words in str(error.value)


@pytest.mark.parametrize(
    "line",
    ["--no_flag_of_this=1", "--match_label_shares=dev", "--epochs=many"],
    ids=["another module's", "withdrawn", "damaged"],
)
def test_flags_of_another_experiments_run_are_one_clear_error(here, tested, line):
    foreign = here / "foreign"
    foreign.mkdir(exist_ok=True)
    (foreign / "run.flags").write_text(f"{line}\n")
    words = r"is of no run of finetune_xnli in nebula_jax 0\.\d\.\d: \w"
    with pytest.raises(errors.NebulaError, match=words):
        tested("foreign")


def test_a_folder_goes_on_only_with_its_own_settings(runs, undisturbed, here):
    use(runs, workdir="undisturbed", steps=STEPS, learning_rate=1e-4)
    with pytest.raises(errors.NebulaError, match=r"--learning_rate=0\.002"):
        finetune_xnli.main()


def add_one(path):
    tensors = safetensors.numpy.load_file(path)
    name = next(iter(tensors))
    safetensors.numpy.save_file(tensors | {name: tensors[name] + 1}, path)


def lower_case(path):
    path.write_text('{"do_lower_case": true}')


@pytest.mark.parametrize(
    ("what", "file", "change"),
    [
        ("encoder", "model.safetensors", add_one),
        ("tokenizer", "tokenizer_config.json", lower_case),
    ],
)
def test_a_run_goes_on_and_is_tested_only_with_its_own_encoder(
    runs, undisturbed, here, tested, what, file, change
):
    path = pathlib.Path("models/bert") / file
    before = path.read_bytes()
    try:
        change(path)
        use(runs, workdir="undisturbed", steps=STEPS, eval_only="false")
        with pytest.raises(errors.NebulaError, match=f"holds a run with (--)?{what}="):
            finetune_xnli.main()
        with pytest.raises(errors.NebulaError, match=f"with another {what} than"):
            tested("undisturbed")
    finally:
        path.write_bytes(before)


# As xnli_warm.flags and Table 1 have it.
WARM = {"freeze_embeddings": "true", "pooling": "mean", "dtype": "bfloat16"}


def test_the_small_recipe_is_trained_and_tested_alike(runs, here, tested, capsys):
    """Frozen embeddings, mean pooling, bfloat16; the last step, half an epoch."""
    output = runs.finished(
        workdir="warm", epochs=0.5, checkpoint_selection="last", export="true", **WARM
    )
    trained = runs.state("warm", "finetune", 6)["best"]
    before = pretrained.load(pathlib.Path("models/bert"))
    left = pretrained.load(pathlib.Path("warm/finetune/encoder"))
    trees.assert_same(left.params["encoder"], trained["encoder"])
    trees.assert_same(left.params["embeddings"], before.params["embeddings"])
    assert tested("warm") == 0
    assert table(capsys.readouterr().out) == table(output)
    summary = json.loads((here / "warm" / "summary.json").read_text())
    assert summary["selected_step"] == summary["dev"][-1]["step"] == 6


def test_a_run_that_has_selected_nothing_yet_is_not_tested(
    undisturbed, tested, monkeypatch
):
    read = checkpoint.read
    monkeypatch.setattr(
        checkpoint, "read", lambda *at: read(*at) | {"selected_step": 0}
    )
    with pytest.raises(errors.NebulaError, match="no step of it is selected"):
        tested("undisturbed")
