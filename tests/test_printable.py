import pytest

from nebula_jax import printable


@pytest.mark.parametrize(
    "evil",
    [
        "\x1b[2J",  # clears the screen
        "\x1b]0;title\x07",
        "\n[discriminator] all is well",
        "\r overwritten",
        "\x85",
        "\u2028next",
        "\u202etxt.exe",  # right to left
        "\u2066\u2069",  # isolates
        "\u200f",
        "\x9b31m",  # an escape sequence's start, in one character
        "\ud800",  # half a character: cannot be printed at all
        "\x00",
    ],
)
def test_nothing_that_moves_a_terminal_is_left(evil):
    shown = printable.line(evil)
    assert "\ufffd" in shown
    assert shown.isprintable()
    shown.encode()
    assert printable.line({"key": evil}).isprintable()


def test_text_of_any_language_stays():
    for text in ("λ=0.5", "größer", "中文", "שלום", "a b"):
        assert printable.line(text) == text
    assert printable.line("a\tb") == "a b"


def test_long_values_are_cut():
    assert len(printable.line("x" * 60_000)) == printable.LIMIT
    assert len(printable.line(["x" * 60_000] * 3, limit=80)) == 80


def test_values_that_python_cannot_write_are_shown_as_such():
    deep: list = []
    for _ in range(200_000):
        deep = [deep]
    assert printable.line(deep) == "(deeply nested)"
    while deep:  # else its end is as deep
        deep = deep.pop()


def test_a_message_of_our_own_keeps_its_lines():
    assert printable.lines("a\n  ^\x1b") == "a\n  ^\ufffd"


def test_sizes_at_the_ends_of_their_units():
    counts = (0, 999, 1000, 999_960, 10**9, 2 * 10**18)
    words = ["0 bytes", "999 bytes", "1.0 kB", "1.0 MB", "1.0 GB", "2000.0 PB"]
    assert list(map(printable.size, counts)) == words
