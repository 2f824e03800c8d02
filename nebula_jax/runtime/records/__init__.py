"""The records of a run: its folder, checkpoints, progress and reports."""
