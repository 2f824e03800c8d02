"""The rooms of `leakage`: the run that is attacked, and the attacks on it."""
