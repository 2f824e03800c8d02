"""The flag of every script that writes one thing."""

from absl import flags

OUT = flags.DEFINE_string("out", "", "The file or folder to write.")
