"""Nebula-JAX: train one model over several remote clusters joined by a slow line."""

__version__ = "0.3.0"
