"""Figures of a model on text it was not trained on."""
