import collections
import hashlib
import hmac
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from nebula_jax.communication.wire import frames
from nebula_jax.data import example_alignment

KEY = b"a key"
MANY = [f"train-{n:06d}" for n in range(2000)]


def compared(mine, theirs, key=KEY, their_key=KEY):
    """Differences that the one side finds, given what the other says as JSON."""
    said = json.loads(json.dumps(example_alignment.fingerprint(theirs, their_key)))
    return example_alignment.differences(mine, key, said)


def test_a_fingerprint_is_counts_and_xors_of_keyed_digests():
    ids = {"train": ["a", "b", "c"], "dev": ["a"]}
    counts, xors = collections.Counter(), collections.Counter()
    for message in (b"train\ta", b"train\tb", b"train\tc", b"dev\ta"):
        tag = hmac.new(KEY, message, hashlib.sha256).digest()
        digest = int.from_bytes(tag[:8], "big")
        counts[digest % 1024] += 1
        xors[digest % 1024] ^= digest
    said = example_alignment.fingerprint(ids, KEY)
    assert said["splits"] == {"train": 3, "dev": 1}
    assert said["counts"] == "".join(f"{counts[group]:08x}" for group in range(1024))
    assert said["xors"] == "".join(f"{xors[group]:016x}" for group in range(1024))


def test_it_fits_a_hello_and_shows_no_id():
    said = example_alignment.fingerprint({"train": MANY}, KEY)
    hello = frames.Hello("source", "0.1.0", {"examples": said})
    frames.encode(hello, 1, 0)  # raises if it is too large
    assert len(json.dumps(said)) < frames.MAX_HELLO_BYTES / 2
    assert "train-" not in json.dumps(said)


@hypothesis.given(st.permutations(MANY[:30]))
def test_sides_with_the_same_ids_agree_in_whatever_order(order):
    assert compared({"train": order}, {"train": MANY[:30]}) == []
    assert compared({"train": order, "dev": []}, {"train": [], "dev": MANY[:30]})


def test_the_side_with_an_extra_example_names_it_and_the_other_knows_it_lacks_one():
    more, fewer = {"train": MANY}, {"train": [*MANY[:700], *MANY[701:]]}
    assert compared(more, fewer) == [
        "train has 2000 examples here and 1999 at the peer",
        "example 'train-000700' of train is on this side only",
    ]
    assert compared(fewer, more) == [
        "train has 1999 examples here and 2000 at the peer",
        "the peer has an example that this side lacks; its own message names the id",
    ]


def test_differences_that_meet_in_one_group_are_no_agreement():
    by_group = collections.defaultdict(list)
    for name in MANY:
        tag = hmac.digest(KEY, f"train\t{name}".encode(), "sha256")
        by_group[int.from_bytes(tag[:8], "big") % 1024].append(name)
    one, other = next(names for names in by_group.values() if len(names) == 2)
    unclear = "more ids differ, in 1 of 1024 groups, than can be found"
    rest = [name for name in MANY if name not in (one, other)]
    assert compared({"train": MANY}, {"train": rest})[1:] == [unclear]
    # As many in the group on both sides, and others.
    assert compared({"train": [*rest, one]}, {"train": [*rest, other]}) == [unclear]


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.sets(st.sampled_from(MANY), max_size=4),
    st.sets(st.sampled_from(MANY), max_size=4),
)
def test_no_example_is_named_that_the_peer_has_and_few_ones_are_all_found(gone, lost):
    """`gone` is missing at the peer, `lost` on this side."""
    mine = [name for name in MANY if name not in lost - gone]
    theirs = [name for name in MANY if name not in gone]
    found = compared({"train": mine}, {"train": theirs})
    assert bool(found) == bool(gone or lost - gone)
    named = {line.split("'")[1] for line in found if line.startswith("example ")}
    assert named <= gone
    together = any("can be found" in line for line in found)  # two met in one group
    others = [line for line in found if line.startswith("so are ")]
    if not together and not lost:
        expected = len(gone) - example_alignment.SHOWN
        assert others == ([f"so are {expected} others"] if expected > 0 else [])
        assert len(named) == min(len(gone), example_alignment.SHOWN)


def test_different_keys_are_told_from_different_examples():
    found = compared({"train": MANY}, {"train": MANY}, their_key=b"another")
    assert found == [
        "the two sides have different keys, so their ids cannot be compared"
    ]
    assert example_alignment.default_key("a", "b") != example_alignment.default_key(
        "ab", ""
    )


@pytest.mark.parametrize(
    "change",
    [
        {"counts": "00"},
        {"counts": "zz" * 4096},
        {"xors": None},
        {"splits": {"train": "many"}},
        {"splits": {"train": 1}},
        {"splits": 2000},
        {"key": 7},
    ],
)
def test_a_fingerprint_that_is_none_is_the_peers_fault(change):
    said = {**example_alignment.fingerprint({"train": MANY}, KEY), **change}
    with pytest.raises(example_alignment.AlignmentError, match="malformed"):
        example_alignment.differences({"train": MANY}, KEY, said)
    for nothing in (None, [], {}, "x"):
        with pytest.raises(example_alignment.AlignmentError, match="malformed"):
            example_alignment.differences({"train": MANY}, KEY, nothing)
