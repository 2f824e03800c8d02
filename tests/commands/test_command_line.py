import importlib
import re

import pytest
import tiny_runs
from absl import flags
from absl.testing import flagsaver

from nebula_jax import errors
from nebula_jax.commands import command_line
from nebula_jax.communication import codecs

MODULES = sorted(
    ".".join(path.relative_to(tiny_runs.ROOT).with_suffix("").parts)
    for folder in ("experiments", "scripts")
    for path in (tiny_runs.ROOT / folder).rglob("*.py")
    if re.search(r"flags\.DEFINE_|fields\.define", path.read_text())
)


@pytest.fixture(autouse=True, scope="module")
def every_command_has_its_flags():
    for module in MODULES:
        importlib.import_module(module)


def failing(error):
    """A command that ends with an error."""

    def main():
        raise error

    return main


def refusal(main, *given):
    """What a command says, given these flags, that ends by a bad setting."""
    with flagsaver.flagsaver():
        command_line.parse(["test", *given])
        with pytest.raises(errors.SettingsError) as refused:
            command_line.with_flags(main)
    return str(refused.value)


def test_no_number_that_is_not_finite():
    every = [flags.FLAGS[name] for name in flags.FLAGS]
    found = [each.name for each in every if isinstance(each.parser, flags.FloatParser)]
    assert {"learning_rate", "epochs", "label_smoothing"} <= set(found)
    tried = [(name, "nan") for name in found]
    tried += [("learning_rate", value) for value in ("inf", "-inf", "1e999")]
    for name, value in tried:
        with flagsaver.flagsaver(), pytest.raises(flags.Error, match=name):
            command_line.parse(["test", f"--{name}={value}"])


@pytest.mark.parametrize("value", ["a\n--steps=3", "a\rb", "\x1b[2J", "\udcff"])
def test_no_argument_that_would_be_no_line_of_a_flagfile(value):
    with flagsaver.flagsaver(), pytest.raises(flags.Error, match="control characters"):
        command_line.parse(["test", f"--workdir={value}"])
    with flagsaver.flagsaver(), pytest.raises(flags.Error, match="control characters"):
        command_line.parse(["test", f"--flagfile={value}.flags"])
    with flagsaver.flagsaver():
        command_line.parse(["test", "--workdir=läufe/走 1", "--data_dir=\u3000"])


def test_whole_numbers():
    for text, number in (("0", 0), ("12", 12), ("007", 7)):
        assert command_line.whole_number(text) == number
    for text in ("", "²", "٣", "-1", "+1", "1_0", " 1", "1\n", "9" * 5000):
        assert command_line.whole_number(text) is None


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (
            "fsdp=3 does not divide batch_size=16",
            "--fsdp=3 does not divide --batch_size=16",
        ),
        ("delay must be below 3", "--delay must be below 3"),
        ("nobody came (connect_timeout)", "nobody came (--connect_timeout)"),
        ("a; name another workdir", "a; name another --workdir"),
        ("--steps=3: x=1 and seed-less", "--steps=3: x=1 and seed-less"),
        ("no steps in a/b.steps=3", "no steps in a/b.steps=3"),
    ],
)
def test_errors_of_the_library_name_flags_in_commands(raised, shown):
    assert refusal(failing(errors.SettingsError(raised))) == shown


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (errors.NebulaError("/nowhere is no folder"), "/nowhere is no folder"),
        (errors.NebulaError("vocabulary /nowhere: gone"), "vocabulary /nowhere: gone"),
        (FileNotFoundError(2, "No such file", "/nowhere"), "No such file"),
        (NotADirectoryError(20, "Not a directory", "/nowhere"), "Not a directory"),
    ],
)
def test_a_path_that_is_not_there_is_a_bad_setting_and_named_by_its_flag(raised, shown):
    said = refusal(failing(raised), "--workdir=/nowhere")
    assert said == f"--workdir=/nowhere: {shown}"


@pytest.mark.parametrize(
    ("flag", "value", "raised"),
    [
        ("vocabulary", "none.model", "vocabulary none.model: No such file"),
        ("federation", "nowhere", "nowhere: no lab of a federation is here"),
        ("hot_start", "e6", "e6: no such model; there are e5-small"),
        ("model", "e6", "e6: no such model; there are e5-small"),
    ],
)
def test_a_path_needs_no_slash_to_be_known_as_one(flag, value, raised):
    said = refusal(failing(errors.NebulaError(raised)), f"--{flag}={value}")
    assert said == f"--{flag}={value}: {raised}"


def test_a_codec_that_cannot_be_read_is_named_by_its_flag():
    codec = "int9|fp16"
    said = refusal(lambda: codecs.from_string(codec), f"--delta_codec={codec}")
    assert said.splitlines() == [
        "--delta_codec: unknown codec int9; did you mean int8?",
        "  int9|fp16",
        "  ^",
    ]


@pytest.mark.parametrize(
    "raised",
    [
        OSError(28, "No space left on device", "/elsewhere/run"),
        errors.NebulaError("/nowhere2 is no folder"),
        errors.NebulaError("source and target do not hold the same examples"),
        RuntimeError("anything else"),
    ],
)
def test_an_error_of_no_flag_stays_as_it_is(raised):
    text = str(raised)
    with flagsaver.flagsaver():
        command_line.parse(["test", "--workdir=/nowhere", "--cluster=source"])
        with pytest.raises(type(raised)) as same:
            command_line.with_flags(failing(raised))
    assert same.value is raised
    assert str(raised) == text


def test_what_lacks_memory_names_the_flags_that_take_less(monkeypatch):
    """Of this command alone, with their values."""
    text = "RESOURCE_EXHAUSTED: Out of memory allocating 4096000000000 bytes."

    def main():
        raise RuntimeError(text)

    own = [flags.FLAGS[name] for name in ("batch_size", "micro_batches", "workdir")]
    monkeypatch.setattr(
        type(flags.FLAGS), "get_key_flags_for_module", lambda self, module: own
    )
    with flagsaver.flagsaver():
        command_line.parse(["test", "--batch_size=100000"])
        with pytest.raises(errors.NebulaError) as refused:
            command_line.with_flags(main)
    said = str(refused.value)
    assert said.startswith("out of memory: 4,096.0 GB were asked for, by main (")
    assert said.endswith(
        "; less is needed with a smaller --batch_size (now 100000), more"
        " --micro_batches (now 1)"
    )


def test_a_flagfile_is_found_by_its_name_ones_own_before_the_package_s(
    tmp_path, monkeypatch
):
    def vocab_size_of(*given):
        with flagsaver.flagsaver():
            command_line.parse(["test", *given])
            return flags.FLAGS.vocab_size

    monkeypatch.chdir(tmp_path)
    name = "m3_quickstart.flags"
    assert vocab_size_of(f"--flagfile={name}") == 4000
    assert vocab_size_of("--flagfile", f"experiments/flags/{name}") == 4000
    (tmp_path / name).write_text("--vocab_size=77\n")
    assert vocab_size_of(f"--flagfile={name}") == 77


@pytest.mark.parametrize("value", ["", "nowhere.flags", "/tmp"])
def test_a_flagfile_that_is_missing_is_named_with_those_that_are_there(value):
    with flagsaver.flagsaver(), pytest.raises(flags.Error) as caught:
        command_line.parse(["test", f"--flagfile={value}"])
    assert "no such file" in str(caught.value)
    assert "m3_quickstart.flags" in str(caught.value)
