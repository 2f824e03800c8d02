"""The parts of the command that plans a run before any cluster is started."""
