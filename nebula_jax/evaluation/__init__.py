"""Evaluation of models on held-out text."""
