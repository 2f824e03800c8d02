"""Configurations as a command line makes them, without one."""

from types import ModuleType
from typing import Any

from absl import flags
from absl.testing import flagsaver


def run(config: ModuleType, *arguments: str, **values: Any) -> Any:
    """Returns what the command of `config`, such as `experiments.m3.config`, passes on,
    given arguments of its command line and values (name -> value)."""
    with flagsaver.flagsaver():
        parse(config, *arguments, **values)
        return config.from_flags()


def parse(config: ModuleType, *arguments: str, **values: Any) -> None:
    """Sets the flags as the experiment's command does; for a flagsaver's block."""
    for name, value in config.DEFAULTS.items():
        flags.FLAGS.set_default(name, value)
    given = [f"--{name}={value}" for name, value in values.items()]
    flags.FLAGS(["test", *arguments, *given])
