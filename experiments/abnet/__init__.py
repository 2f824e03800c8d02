"""The parts of train_abnet."""
