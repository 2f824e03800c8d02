"""The one error class that entry points print without a traceback."""


class NebulaError(Exception):
    """Something a person can mend; its text says in one line what and where."""
