import numpy as np
import pytest

from nebula_jax import errors
from nebula_jax.federation import requests
from nebula_jax.runtime.served import data_channels
from nebula_jax.security import grants, names

PARTS = [
    data_channels.Part("mono/es", "train", "ab12", 1000),
    data_channels.Part("parallel/de", "valid", "cd34", 7),
]


def test_the_value_of_a_flag_is_a_handle_and_perhaps_a_lab():
    assert data_channels.parse("handle:corpus-es") == ("corpus-es", "")
    assert data_channels.parse("handle:corpus-es@lab-s") == ("corpus-es", "lab-s")


@pytest.mark.parametrize(
    "text",
    [
        *("corpus-es", "handle:", "handle:/data/es", "handle:../es", "handle:a@b@c"),
        *("handle:corpus-es@", "handle:corpus-es@Lab S", "handle:Corpus", "file:x"),
    ],
)
def test_anything_else_is_named(text):
    with pytest.raises(errors.SettingsError, match="data="):
        data_channels.parse(text)


@pytest.mark.parametrize("count", [1, 20, 200])
def test_a_description_comes_back(count):
    parts = PARTS * count
    page = data_channels.described(parts)
    assert (page.shape, page.dtype) == (data_channels.PAGE.shape, np.uint8)
    assert data_channels.read_description(page) == parts
    with pytest.raises(data_channels.DataError, match="too much for one handle"):
        data_channels.described(PARTS * 3000)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[1]", '[["a","b","c",-1]]', '[["a","b","c",1.5]]', '["a"]'),
        *('[["a","b","c",true]]', '[["a","b","c",1,9]]', '[["a\\u001b","b","c",1]]'),
        *('[["a","b","c",4294967296]]', "[" * 3000),
    ],
)
def test_a_description_that_cannot_be_is_refused(text):
    page = np.frombuffer(text.encode() + b"\0", np.uint8)
    with pytest.raises(data_channels.DataError):
        data_channels.read_description(page)


def test_a_handle_has_a_job_of_its_own():
    assert requests.is_job(data_channels.job_of("corpus-es"))
    assert requests.is_job(data_channels.job_of("c" * 59))
    with pytest.raises(grants.GrantError, match="up to 59"):
        data_channels.job_of("c" * 60)


def test_no_two_readers_have_one_name():
    who = ["lab-s", "m3", "generator:0"]
    found = {data_channels.reader_name(*who)}
    for place in range(3):
        found.add(data_channels.reader_name(*who[:place], "x", *who[place + 1 :]))
    found.add(data_channels.reader_name("lab-sm3", "", "generator:0"))
    assert len(found) == 5
    longest = data_channels.reader_name("l" * 63, "j" * 64, "g" * 63)
    assert all(names.is_cluster(name) for name in (*found, longest))
