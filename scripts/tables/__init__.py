"""The parts of the commands that reproduce the tables."""
