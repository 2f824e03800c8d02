"""The errors that entry points print in one line, without a traceback."""


class NebulaError(Exception):
    """Something a person can mend; its text states in one line what and where."""


class SettingsError(NebulaError):
    """Settings that cannot work, alone or together."""
