"""Settings that are written once: each flag is made from a field, and read into it."""

import dataclasses
import pathlib
import types
import typing

import configured
import pytest
from absl import flags
from absl.testing import flagsaver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments import configuration
from experiments.abnet import config as abnet_config
from experiments.bert import config as bert_config
from experiments.m3 import config as m3_config
from experiments.xnli import config as xnli_config
from nebula_jax import errors
from nebula_jax.commands import command_line, fields

CONFIGS = {
    "pretrain_m3": m3_config,
    "pretrain_bert": bert_config,
    "train_abnet": abnet_config,
    "finetune_xnli": xnli_config,
}
all_experiments = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def flag(name):
    return flags.FLAGS[name]


@all_experiments
def test_every_flag_has_a_help_a_group_and_a_default_that_it_takes(config):
    for name in config.FLAGS:
        made = flag(name).setting
        assert made.help.endswith(".")
        assert made.group in command_line.GROUPS
        default = flag(name).default
        text = ",".join(default) if isinstance(default, list) else default
        if text is not None:  # not given
            assert flag(name).parser.parse(text) == default


@all_experiments
def test_ten_flags_are_for_a_newcomer(config):
    first = [name for name in config.FLAGS if flag(name).setting.group == "first"]
    assert 5 <= len(first) <= 10


def values_of(name, kind):
    """A strategy for the text of a flag's value; None leaves it out."""
    made = flag(name).setting
    if isinstance(kind, types.UnionType):
        return st.none() | values_of(name, typing.get_args(kind)[0])
    if made.choices:
        return st.sampled_from(made.choices)
    if isinstance(made.default, tuple):
        part = st.integers(1, 999) if kind != tuple[str, ...] else st.sampled_from("ab")
        most = 1 if kind is int else 3
        return st.lists(part, min_size=1, max_size=most).map(
            lambda found: ",".join(map(str, found))
        )
    if kind is bool:
        return st.booleans()
    if kind is int:
        most = 999 if made.upper is None else made.upper
        return st.integers(made.lower, most)
    if kind is float:
        most = 1e6 if made.upper is None else made.upper
        return st.floats(made.lower, most)
    return st.text("abc =,:-|%é", min_size=1, max_size=9).map(lambda text: f"x{text}")


@all_experiments
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_arguments_make_any_settings_again(config, data):
    """Each setting by itself: most of them are refused in some company."""
    every = dataclasses.fields(config.Agreed) + dataclasses.fields(config.Local)
    field = data.draw(st.sampled_from(every))
    value = data.draw(values_of(field.name, field.type))
    text = str(value).lower() if isinstance(value, bool) else value
    try:
        run = configured.run(config, **{} if value is None else {field.name: text})
        again = configured.run(config, *configuration.arguments(run))
    except errors.NebulaError:
        return
    assert again == run


def test_a_flag_is_of_the_type_of_its_field():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own:
        own_number: int = fields.of_run(3, "A number.", lower=1, upper=5)
        own_share: float | None = fields.of_run(None, "A share.")
        own_switch: bool = fields.of_run(False, "A switch.")
        own_list: tuple[int, ...] = fields.of_run((8, 16), "Numbers.")
        own_folder: pathlib.Path = fields.of_run("a", "A folder.")
        seed: int  # another class's

    assert fields.define(Own) == fields.define(Own) == fields.names(Own)
    with flagsaver.flagsaver():
        flags.FLAGS(["test", "--own_number=5", "--own_switch", "--seed=7"])
        assert fields.read(Own) == Own(
            own_number=5,
            own_share=None,
            own_switch=True,
            own_list=(8, 16),
            own_folder=pathlib.Path("a"),
            seed=7,
        )
        for bad in ("--own_number=6", "--own_number=x", "--own_share=x"):
            with pytest.raises(flags.Error, match=bad.partition("=")[0].strip("-")):
                flags.FLAGS(["test", bad])


def test_no_flag_is_defined_twice():
    @dataclasses.dataclass
    class Other:
        seed: int = fields.of_run(0, "Another seed.")

    with pytest.raises(flags.Error, match="--seed is defined twice"):
        fields.define(Other)


def test_a_list_may_have_one_number():
    assert configured.run(bert_config, clusters=3).agreed.clusters == 3
    for value in ("", "1,2", "²", "x"):
        with pytest.raises(errors.SettingsError, match=f"--clusters={value}: exp"):
            configured.run(bert_config, clusters=value)


@pytest.mark.parametrize("value", ["8,²", "-1"])
def test_lists_of_numbers_have_numbers(value):
    with pytest.raises(errors.SettingsError, match="expected numbers such as"):
        configured.run(xnli_config, length_buckets=value)
