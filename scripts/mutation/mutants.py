"""The mutants of a module: cosmic-ray makes them, a seed draws some of them.

A mutant is a module's source with one small change, such as `<` for `<=`. Annotations
are left alone: nothing evaluates them.
"""

import contextlib
import functools
import importlib.util
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nebula_jax import errors

# Operators of cosmic-ray that are left out.
NEEDS_ARGUMENTS = ("VariableReplacer", "VariableInserter")  # names of variables
# For `is`, which compares enum members and None here, `==` makes no difference.
NO_DIFFERENCE = tuple(
    f"ReplaceComparisonOperator_{one}"
    for one in ("Is_Eq", "Eq_Is", "IsNot_NotEq", "NotEq_IsNot")
)


class Mutant(NamedTuple):
    """A change of a module."""

    module: str
    """Such as `nebula_jax.communication.wire.frames`."""
    line: int
    """The line of the change, from 1."""
    operator: str
    """cosmic-ray's name of the change, such as `ReplaceComparisonOperator_Lt_LtE`."""
    occurrence: int
    """The number of the place, of those that the operator fits, from 0."""

    @property
    def name(self) -> str:
        """The place and the kind of the change."""
        return f"{self.module}:{self.line} {self.operator}"


def source_of(module: str) -> pathlib.Path:
    """Returns the file of a module, without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return pathlib.Path(spec.origin)


def draw(module: str, seed: int) -> Iterator[Mutant]:
    """Yields a module's mutants in random order, one for each place.

    Args:
      module: to change.
      seed: of the order, and of the operator where several fit a place.
    """
    # A string is a seed whose numbers are the same in every process.
    chance = random.Random(f"{seed} {module}")
    places: dict[Any, list[Mutant]] = {}
    for place, mutant in _all(module, source_of(module).read_text("utf-8")):
        places.setdefault(place, []).append(mutant)
    order = sorted(places)
    chance.shuffle(order)
    for place in order:
        mutant = chance.choice(places[place])
        with contextlib.suppress(CannotBeMade):
            mutated(mutant)
            yield mutant


class CannotBeMade(errors.NebulaError):
    """A place where cosmic-ray finds a change, and fails to make it."""


@functools.cache
def mutated(mutant: Mutant) -> str:
    """Returns the source of a mutant's module with its change.

    Raises:
      CannotBeMade: such as of another exception for `errors.NebulaError`.
    """
    mutating = _cosmic_ray().mutating
    plugins = _cosmic_ray().plugins
    source = source_of(mutant.module).read_text("utf-8")
    operator = plugins.get_operator(f"core/{mutant.operator}")()
    try:
        changed = mutating.mutate_code(source, operator, mutant.occurrence)
    except AttributeError as error:
        raise CannotBeMade(mutant.name) from error
    assert changed is not None
    return changed


def _all(module: str, source: str) -> Iterator[tuple[Any, Mutant]]:
    """Yields every place of a change, and the mutant."""
    cosmic_ray = _cosmic_ray()
    tree = cosmic_ray.ast.get_ast(source)
    nodes = list(_walk(tree))
    for full_name in sorted(cosmic_ray.plugins.operator_names()):
        name = full_name.removeprefix("core/")
        if name in NEEDS_ARGUMENTS + NO_DIFFERENCE:
            continue
        operator = cosmic_ray.plugins.get_operator(full_name)()
        occurrence = 0
        for node in nodes:
            for start, end in operator.mutation_positions(node):
                if not _is_annotation(node):
                    yield (start, end), Mutant(module, start[0], name, occurrence)
                occurrence += 1


def _walk(node: Any) -> Iterator[Any]:
    """Yields a tree's nodes in cosmic-ray's order, by which it counts occurrences."""
    yield node
    for child in getattr(node, "children", ()):
        yield from _walk(child)


def _is_annotation(node: Any) -> bool:
    """Returns True if nothing evaluates the node when the code runs."""
    while (parent := node.parent) is not None:
        before = parent.children[: parent.children.index(node)]
        marks = [each.value for each in before if hasattr(each, "value")]
        if parent.type == "annassign" and "=" not in marks:
            return True
        if parent.type == "tfpdef" or (parent.type == "funcdef" and "->" in marks[-1:]):
            return True
        node = parent
    return False


def _cosmic_ray() -> Any:
    """Returns the library, which is not among the project's own."""
    try:
        import cosmic_ray.ast
        import cosmic_ray.mutating
        import cosmic_ray.plugins
    except ImportError:
        raise errors.NebulaError(
            "cosmic-ray is missing: pip install -r requirements-mutation.txt"
        ) from None
    return cosmic_ray


def modules(patterns: Sequence[str]) -> list[str]:
    """Returns the modules of files, given relative to the project's folder.

    Args:
      patterns: such as `nebula_jax/security/*.py`.
    """
    root = pathlib.Path(__file__).parents[2]
    found = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    return [
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in found
        if path.name != "__init__.py"
    ]
