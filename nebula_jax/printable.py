"""Text of others, fit to be printed: it fills one line, and does nothing to a terminal.

Whatever a peer sends may hold escape sequences, newlines that pretend to be another
message, marks that turn the reading direction, or 60 kB.
"""

from typing import Any

LIMIT = 200  # characters of one value
LINE_LIMIT = 4000  # characters of a whole message


def line(value: Any, limit: int = LIMIT) -> str:
    r"""Returns a value's text in one line; what cannot be printed becomes `�`.

    >>> line("a\x1b[2J\nb\u202ec")
    'a�[2J�b�c'
    >>> line("x" * 1000, limit=8)
    'xxxxx...'

    A text of more than `limit` characters is cut.
    """
    try:
        text = str(value)
    except RecursionError:
        text = "(deeply nested)"
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    return "".join(
        each if each.isprintable() else " " if each == "\t" else "\ufffd"
        for each in text
    )


def lines(text: str) -> str:
    """Returns a message of this program's own in its lines, each fit to be printed."""
    return "\n".join(line(each, LINE_LIMIT) for each in text.split("\n"))


def size(count: float) -> str:
    """Returns a number of bytes in a unit that suits it.

    >>> size(786_432), size(12)
    ('786.4 kB', '12 bytes')
    """
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 999.95:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"
