import re

import pytest

from nebula_jax import errors
from nebula_jax.security import names


@pytest.mark.parametrize(
    "name", ["discriminator", "generator:0", "g-12", "d", "a" * 63]
)
def test_names_of_clusters(name):
    assert names.is_cluster(name)
    names.check([name, "another"])


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../../evil", "/etc/evil", "a/b", "a\\b", "a.b", "*"),
        *("a b", "a\n", "\n", "\x1b[2J", "-a", "a-", ":0", "a:", "a::0", "A", "²"),
        *("generator:٣", "ü", "a" * 64),
    ],
)
def test_what_is_no_clusters_name(name):
    assert not names.is_cluster(name)
    with pytest.raises(errors.SettingsError, match="is no cluster's name"):
        names.check(["discriminator", name])


@pytest.mark.parametrize(
    "clusters",
    [
        ("generator:0", "generator-0"),
        ("generator-0", "generator:0"),
        ("source", "source"),
    ],
)
def test_two_clusters_never_share_a_certificate(clusters):
    words = f"{clusters[0]} and {clusters[1]} would have the same certificate"
    with pytest.raises(errors.SettingsError, match=re.escape(words)):
        names.check(["discriminator", *clusters])


def test_labels():
    assert names.label("generator:3") == "generator-3"
