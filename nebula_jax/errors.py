"""The errors that entry points print in one line, without a traceback."""


class NebulaError(Exception):
    """An error that a person can mend; its text states in one line what and where."""


class PeerAbsent(NebulaError):
    """An error that is over once another cluster comes (back): trying again helps."""


class SettingsError(NebulaError):
    """A setting that cannot work, alone or with others."""


class PeerLost(NebulaError):
    """A peer that cannot come back, as one whose certificate was revoked."""
