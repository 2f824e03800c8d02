"""A setting of a command, written once: a dataclass's field, of which its flag is made.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Agreed:
        steps: int = fields.of_run(1000, "Optimization steps.", lower=1)

    FLAGS = fields.define(Agreed)  # --steps, an integer of at least 1
    fields.read(Agreed).steps      # in `main`, when flags are parsed

A field without a setting is the flag of its name that another class has defined.
"""

import dataclasses
import functools
import pathlib
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from absl import flags

from nebula_jax import errors
from nebula_jax.commands import command_line

flags.disclaim_key_flags()  # a flag is of the module that calls `define`

Values = TypeVar("Values")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A description of a flag."""

    default: Any  # None if the flag need not be given
    help: str  # sentences that begin with the unit, or with the kind of value
    group: str  # a key of `command_line.GROUPS`
    lower: float = 0  # bound of a number, which may be the bound; so is `upper`
    upper: float | None = None
    choices: Sequence[str] = ()
    source: str = ""  # section of the paper, or other work, that the default is from


def setting(default: Any, help: str, **about: Any) -> Any:
    """Returns a field of a dataclass that is a flag, described by a `Setting`.

    The field has no default of its own: `command_line.run` may replace the flag's.
    """
    return dataclasses.field(metadata={"setting": Setting(default, help, **about)})


to_begin_with = functools.partial(setting, group="first")
of_run = functools.partial(setting, group="run")
of_model = functools.partial(setting, group="model")
of_data = functools.partial(setting, group="data")
of_training = functools.partial(setting, group="training")
of_line = functools.partial(setting, group="line")
of_security = functools.partial(setting, group="security")
for_experts = functools.partial(setting, group="expert")


def define(*classes: type) -> list[str]:
    """Defines flags of classes, and returns all fields; flags.Error if one is twice."""
    for field in (each for cls in classes for each in dataclasses.fields(cls)):
        made = field.metadata.get("setting")
        if made is None:
            continue
        if field.name not in flags.FLAGS:
            _define(field, made)
            setattr(flags.FLAGS[field.name], "setting", made)  # noqa: B010  (read back by --help)
        elif getattr(flags.FLAGS[field.name], "setting", None) is not made:
            raise flags.Error(f"--{field.name} is defined twice")
    return names(*classes)


def names(*classes: type) -> list[str]:
    """Returns the names of the fields of classes."""
    return [each.name for cls in classes for each in dataclasses.fields(cls)]


def read(cls: type[Values], given: flags.FlagValues = flags.FLAGS) -> Values:
    """Returns a dataclass filled from flags; SettingsError if no number is one."""
    found: Sequence[Any] = dataclasses.fields(cls)  # type: ignore[arg-type]
    return cls(**{each.name: _value(each, given) for each in found})


def common(values: Any, cls: type) -> dict[str, Any]:
    """Returns the fields of a dataclass's values that another, `cls`, has as well."""
    shared = set(names(type(values))) & set(names(cls))
    return {name: getattr(values, name) for name in names(cls) if name in shared}


def _define(field: dataclasses.Field[Any], made: Setting) -> None:
    """Defines the flag of a field by the field's type."""
    about = made.help if not made.source else f"{made.help} Default of {made.source}."
    kind: Any = field.type
    if isinstance(kind, types.UnionType):  # `int | None`: None if not given
        kind, _ = typing.get_args(kind)
    if made.choices:
        flags.DEFINE_enum(field.name, made.default, made.choices, about)
        # absl puts the choices in front, where they hide the sentence.
        flags.FLAGS[field.name].help = f"{about}\n{' | '.join(made.choices)}"
    elif isinstance(made.default, tuple):
        flags.DEFINE_list(field.name, list(map(str, made.default)), about)
    elif kind is bool:
        flags.DEFINE_bool(field.name, made.default, about)
    elif kind in (int, float):
        number: Any = flags.DEFINE_integer if kind is int else flags.DEFINE_float
        bounds = {"lower_bound": made.lower, "upper_bound": made.upper}
        number(field.name, made.default, about, **bounds)
    else:
        flags.DEFINE_string(field.name, made.default, about)


def _value(field: dataclasses.Field, given: flags.FlagValues) -> Any:
    """Returns the value of a field's flag in the field's type."""
    value: Any = given[field.name].value
    if field.name == "workdir":
        return command_line.workdir(value)
    if field.type is pathlib.Path:
        return pathlib.Path(value)
    if not isinstance(value, list):
        return value
    if field.type not in (int, tuple[int, ...]):
        return tuple(value)
    numbers = tuple(command_line.whole_number(part.strip()) for part in value)
    is_one = field.type is int  # a flag that another command has a list of
    if None in numbers or (is_one and len(numbers) != 1):
        expected = "one number such as 2" if is_one else "numbers such as 16,32"
        raise errors.SettingsError(
            f"--{field.name}={','.join(value)}: expected {expected}"
        )
    return numbers[0] if is_one else numbers
