import numpy as np
import pytest

from nebula_jax.runtime.life import memory, process


def caught(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError


def ask(text):
    raise RuntimeError(text)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (
            "RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes.",
            "70,368.7 GB were asked for",
        ),
        (  # a GPU
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 80.5GiB.",
            "80.5GiB were asked for",
        ),
        (
            "INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
            "more was asked for than there is",
        ),
    ],
)
def test_memory_that_a_device_lacks_is_a_sentence_with_the_line_that_asked(text, asked):
    said = memory.in_words(caught(lambda: ask(text)))
    assert said.startswith(
        f"out of memory: {asked}, by ask (runtime/life/test_memory.py:"
    )
    assert said.endswith(": raise RuntimeError(text))")


def test_memory_that_the_host_lacks_has_the_shape_that_numpy_names():
    said = memory.in_words(caught(lambda: np.zeros((1 << 29, 1 << 28))))
    assert said.startswith(
        "out of memory: 1.00 EiB were asked for, for an array with sh"
    )
    assert memory.in_words(MemoryError()) == (
        "out of memory: more was asked for than there is"
    )


def test_a_process_that_lacks_memory_says_so_in_a_line_and_fails(capsys):
    heard = []
    text = "RESOURCE_EXHAUSTED: Out of memory allocating 4096000000 bytes."
    assert process.guarded(lambda: ask(text), heard.append) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: out of memory: 4.1 GB were asked for, by ask (")
    assert said.endswith(f"; {memory.REMEDY}\n")
    assert said.count("\n") == 1
    assert len(heard) == 1
    with pytest.raises(RuntimeError, match="another"):
        process.guarded(lambda: ask("another"))
