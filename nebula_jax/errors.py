"""The errors that entry points print in one line, without a traceback."""


class NebulaError(Exception):
    """An error that a person can mend; its text states in one line what and where."""


class SettingsError(NebulaError):
    """A setting that cannot work, alone or with others."""
