"""The parts of distill."""
