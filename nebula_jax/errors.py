"""The errors that entry points print in one line, without a traceback."""


class NebulaError(Exception):
    """An error that a person can mend; its text states in one line what and where."""


def reason(error: BaseException) -> str:
    """Returns why this side gives up, for its peers: what is not ours with its type."""
    text = str(error)
    is_status = isinstance(error, SystemExit) and text.isdecimal()
    if is_status or isinstance(error, KeyboardInterrupt):  # by SIGTERM, or Ctrl-C
        return "it was stopped"
    if isinstance(error, NebulaError) and text:
        return text
    return ": ".join(filter(None, [type(error).__name__, text]))


class PeerAbsent(NebulaError):
    """An error that is over once another cluster comes (back): trying again helps."""


class SettingsError(NebulaError):
    """A setting that cannot work, alone or with others."""


class PeerLost(NebulaError):
    """A peer that cannot come back, as one whose certificate was revoked."""
