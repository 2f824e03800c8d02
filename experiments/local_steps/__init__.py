"""The rooms of experiments whose clusters take local steps."""
