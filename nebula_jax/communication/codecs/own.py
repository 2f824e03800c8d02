"""Codecs of one's own in a codec string: `my_codecs:signs(4)`; see `parser`.

`module:name` is a function that makes a codec, or a codec. The module is looked for
where Python looks, and then in the folder that the command runs in, which the processes
of `--cluster=all` share.
"""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from nebula_jax import printable
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import selector

_IN_ORDER = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def found(name: str) -> Callable[..., Any] | selector.CodecOrSelector:
    """Imports `module:name`.

    Raises ValueError if there is no such module, it cannot be imported, or has no such
    codec or function.
    """
    module, _, path = name.partition(":")
    value = _imported(module)
    for part in path.split("."):
        if not hasattr(value, part):
            raise ValueError(f"{module} has no {path}")
        value = getattr(value, part)
    if callable(value) or _is_codec(value):
        return value
    raise ValueError(
        f"{name} is neither a codec nor a function that makes one:"
        f" {printable.line(repr(value))}"
    )


def _imported(module: str) -> Any:
    folder = os.getcwd()
    if not sys.flags.safe_path and not {"", folder} & set(sys.path):
        sys.path.append(folder)  # a script's path begins with its own folder
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if not f"{module}.".startswith(f"{missing}."):
            raise _failed(f"{module} cannot be imported", error) from error
        problem = f"there is no module {missing} in {folder} or on Python's path"
        if module.endswith(".py"):
            problem += "; write it without .py"
        raise ValueError(problem) from None
    except (Exception, SystemExit) as error:
        raise _failed(f"{module} cannot be imported", error) from error


def parameters(make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns a maker's parameters; raises ValueError if they are not all named."""
    found = inspect.signature(make).parameters
    for each in found.values():
        if each.kind not in _IN_ORDER:
            raise ValueError(f"argument {each} has no name that a string could give it")
    return found


def made(
    name: str, make: Callable[..., Any], given: Mapping[str, Any]
) -> selector.CodecOrSelector:
    """Makes a codec, called by its module, function and arguments.

    `name` is `module:name`. Raises ValueError if the function raises anything, or
    returns no codec; its own ValueErrors as they are, since they are about an argument.
    """
    try:
        codec = make(**given)
    except ValueError:
        raise
    except Exception as error:
        raise _failed("it failed", error) from error
    if not _is_codec(codec):
        raise ValueError(f"it returned no codec, but {printable.line(repr(codec))}")
    return codec._replace(name=_named(name, parameters(make), given))


def _named(
    name: str, parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]
) -> str:
    """Returns `my_codecs:signs(4)`, with those defaults that a string could say."""
    shown, is_whole = [], True
    for key, parameter in parameters.items():
        value = given.get(key, parameter.default)
        if _is_codec(value):
            text = value.name
        elif isinstance(value, bool | int | float | str):
            text = str(value).lower() if isinstance(value, bool) else str(value)
        else:
            is_whole = False
            continue
        shown.append(text if is_whole else f"{key}={text}")
    return f"{name}({', '.join(shown)})" if shown else name


def _is_codec(value: Any) -> bool:
    return isinstance(value, codec_lib.Codec | selector.Selector)


def _failed(what: str, error: BaseException) -> ValueError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return ValueError(
        f"{what}: {type(error).__name__}: {printable.line(error)}"
        f" ({os.path.basename(last.filename)}, line {last.lineno})"
    )
