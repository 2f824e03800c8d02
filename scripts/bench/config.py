"""Flags that several benchmarks share."""

from absl import flags

flags.DEFINE_integer(
    "rounds", 5, "Rounds that a figure is the median of.", lower_bound=1
)
