"""A cluster of several processes: one program."""
