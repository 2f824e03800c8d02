"""The rows of Table 5: the paper's ten, and ours."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import flags

from nebula_jax import errors

flags.DEFINE_list("rows", [], "Names of the rows to run; empty for all.")

STARTS = (16, 8, 2)  # Fig. 10: compression begins at 1/16, 1/8, 1/2 of the steps
START_ROW = "FP16(SVD(0.6))+INT8"  # the paper's choice for Fig. 10
RANKS = (192, 128, 96, 64)
NARROWEST = 48
NARROW = "pack_tokens|hadamard|int4(64)|fp16"  # behind a bottleneck; scales as fp16
BY_TOKEN, BY_TOKEN_RANKS = "pack_tokens|int4(row)|fp16|zstd(1)", (208, 192)
"""With one scale for a token, and without a rotation that would make columns alike,
numbers of the last columns are small, and zstd packs them well. With the first
rank there are still 25 times fewer bytes each way over a whole run."""
QUICK = ("baseline", "FP16+INT8", START_ROW, "int4 both ways", "bottleneck of 96")
"""Rows of the scale that takes minutes."""
RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


class Row(NamedTuple):
    """A way to compress both directions."""

    name: str
    forward: str
    backward: str
    is_ours: bool = True
    bottleneck: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of this row's runs."""
        found = [f"--forward_codec={self.forward}", f"--backward_codec={self.backward}"]
        if self.bottleneck:
            found.append(f"--bottleneck={self.bottleneck}")
        return tuple(found)


def rows() -> list[Row]:
    """Lists the paper's ten rows, which send padding, and ours, which do not.

    Commit 1b5534d has three more that the records list: subspace, top_k and delta.
    """
    paper = [
        Row("baseline", "identity", "identity", False),
        Row("FP16+INT8", "fp16", "int8(tensor)", False),
        *(
            Row(f"FP16(SVD({r}))+INT8", f"svd({r})|fp16", "int8(tensor)", False)
            for r in RATIOS
        ),
    ]
    more = [
        Row("no padding", *["pack_tokens"] * 2),
        Row("int8 both ways", *["pack_tokens|int8(64)"] * 2),
        Row("int4 both ways", *["pack_tokens|hadamard|int4(64)"] * 2),
    ]
    narrow = [
        Row(f"bottleneck of {rank}", *[NARROW] * 2, bottleneck=str(rank))
        for rank in (*RANKS, NARROWEST)
    ]
    by_token = [
        Row(
            f"bottleneck of {rank} by token and zstd",
            *[BY_TOKEN] * 2,
            bottleneck=str(rank),
        )
        for rank in BY_TOKEN_RANKS
    ]
    return [*paper, *more, *narrow, *by_token]


def chosen(known: Sequence[Row]) -> list[Row]:
    """Lists the first row, the baseline, and those that --rows names, by default all.

    Raises errors.SettingsError at a name that no row has.
    """
    names = [row.name for row in known]
    given = flags.FLAGS["rows"].value or names
    for name in given:
        if name not in names:
            there = ", ".join(names)
            raise errors.SettingsError(f"--rows: no {name}; there are {there}")
    return [row for row in known if row.name in (names[0], *given)]


def starts(settings: Mapping[str, str]) -> list[tuple[int, Row]]:
    """Lists Fig. 10's rows: the step at which compression begins, and START_ROW so."""
    (row,) = (each for each in rows() if each.name == START_ROW)
    steps = [max(2, int(settings["steps"]) // part) for part in STARTS]
    return [
        (
            step,
            row._replace(
                name=f"{row.name} from {step}",
                forward=f"from_step({step}, {row.forward})",
                backward=f"from_step({step}, {row.backward})",
            ),
        )
        for step in steps
    ]


def file_name(name: str) -> str:
    """Turns a row's name into a file name.

    >>> file_name("FP16(SVD(0.9))+INT8")
    'fp16_svd_0_9_int8'
    """
    letters = "".join(c if c.isalnum() else " " for c in name.lower())
    return "_".join(letters.split())
