"""The proof of a secret in common, without a socket."""

import pytest

from nebula_jax.security import shared_secret

SECRET, OTHER = b"s" * 32, b"o" * 32
WHERE = "10.0.0.1:7071"


def claim(
    asked, secret=SECRET, where=WHERE, number=1, purpose=shared_secret.RENDEZVOUS
):
    return shared_secret.claim(secret, where, number, purpose, asked)


def check(asked, message, secret=SECRET, where=WHERE):
    return shared_secret.check_caller(secret, where, asked, message)


def test_both_know_each_other_and_what_it_is_about():
    asked = shared_secret.challenge()
    claimed, message = claim(asked, number=3, purpose=shared_secret.SERVICE)
    proven, reply = check(asked, message)
    shared_secret.check_listener(SECRET, claimed, reply)
    assert proven == claimed
    assert (proven.number, proven.purpose) == (3, "service")


def test_no_message_shows_the_secret_or_repeats():
    seen = []
    for _ in range(2):
        asked = shared_secret.challenge()
        _, message = claim(asked)
        _, reply = check(asked, message)
        seen += [asked["challenge"], message["challenge"], message["proof"]]
        seen.append(reply["proof"])
    assert len(set(seen)) == 8
    assert all(len(each) == 64 for each in seen)
    assert not {SECRET.hex(), SECRET.decode()} & set(seen)


@pytest.mark.parametrize("changed", [{"secret": OTHER}, {"where": "10.0.0.2:7071"}])
def test_another_secret_or_cluster_proves_nothing_to_either(changed):
    asked = shared_secret.challenge()
    claimed, message = claim(asked, **changed)
    with pytest.raises(shared_secret.Unproven, match="no proof of a caller"):
        check(asked, message)
    other, reply = check(asked, message, **changed)
    assert other == claimed
    with pytest.raises(shared_secret.Unproven, match="no proof of a listener"):
        shared_secret.check_listener(SECRET, claimed._replace(address=WHERE), reply)


def test_what_was_said_on_another_connection_proves_nothing():
    asked = shared_secret.challenge()
    claimed, message = claim(asked)
    _, reply = check(asked, message)
    with pytest.raises(shared_secret.Unproven):
        check(shared_secret.challenge(), message)
    again, _ = claim(asked)
    with pytest.raises(shared_secret.Unproven):
        shared_secret.check_listener(SECRET, again, reply)
    shared_secret.check_listener(SECRET, claimed, reply)


def test_what_a_side_has_said_itself_proves_nothing_to_it():
    """A stranger lets each side answer its own challenge."""
    asked = shared_secret.challenge()
    claimed, message = claim(asked)
    with pytest.raises(shared_secret.Unproven):  # a caller's own proof, sent back
        shared_secret.check_listener(SECRET, claimed, message)
    # The listener's proof for another connection, in the place of a caller's.
    first = shared_secret.challenge()
    _, reply = check(first, claim(first)[1])
    for own in (asked["challenge"], message["challenge"]):
        shown = message | {"challenge": own} | reply
        with pytest.raises(shared_secret.Unproven):
            check(asked, shown)


@pytest.mark.parametrize(
    "changed",
    [
        {"number": "1"},
        {"number": True},
        {"purpose": None},
        {"challenge": "0" * 63},
        {"challenge": ["0" * 64]},
        {"proof": None},
        {"proof": "\ud800\N{SNOWMAN}"},
        {"proof": ""},
        {"number": 2},  # a proof is of one number, one purpose and one challenge
        {"purpose": "service"},
        {"challenge": "0" * 64},
    ],
)
def test_another_claim_than_was_proven_or_none_is_refused(changed):
    asked = shared_secret.challenge()
    _, message = claim(asked)
    with pytest.raises(shared_secret.Unproven):
        check(asked, message | changed)


def test_a_caller_answers_no_other_challenge():
    for asked in ({}, {"challenge": 7}, {"challenge": "x" * 64}):
        with pytest.raises(shared_secret.Unproven, match="no challenge of 32 bytes"):
            claim(asked)


def test_a_listener_with_another_secret_says_so():
    claimed, _ = claim(shared_secret.challenge())
    with pytest.raises(
        shared_secret.OtherSecret, match="another secret, or another address"
    ):
        shared_secret.check_listener(SECRET, claimed, dict(shared_secret.REFUSED))
