"""The rooms of the command `nebula`, a file for each group of its commands."""
