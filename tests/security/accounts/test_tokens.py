"""Tokens of the owner, and proofs that an account has one."""

import pytest
import tiny_accounts

from nebula_jax.security.accounts import logins, tokens

ABOUT = ("lab-s", "corpus-es", "0" * 32, "generator-0:12")
NOW = tiny_accounts.NOW


@pytest.fixture
def here(tmp_path):
    with tiny_accounts.begin(tmp_path / "lab") as made:
        tiny_accounts.person(made, "ana")
        tiny_accounts.person(made, "bob")
        yield made


def proof_of(here, name, about=ABOUT):
    made = logins.login(here, name, tiny_accounts.PASSWORD, NOW, 100.0)
    return made.token, tokens.prove(made.token, about)


def test_a_proof_holds_for_its_account_and_purpose_alone(here):
    token, proof = proof_of(here, "ana")
    assert len(proof) == tokens.PROOF_BYTES
    assert here.has_token("ana", ABOUT, proof, NOW)
    assert not here.has_token("bob", ABOUT, proof, NOW)
    assert not here.has_token("root", ABOUT, proof, NOW)
    for place in range(len(ABOUT)):
        other = (*ABOUT[:place], ABOUT[place] + "x", *ABOUT[place + 1 :])
        assert not here.has_token("ana", other, proof, NOW)
    joined = (ABOUT[0] + ABOUT[1], *ABOUT[2:])
    assert not here.has_token("ana", joined, proof, NOW)
    assert token.encode() not in proof


def test_a_proof_ends_with_its_token(here):
    token, proof = proof_of(here, "ana")
    assert not here.has_token("ana", ABOUT, proof, NOW + 100.0)
    logins.logout(here, token)
    assert not here.has_token("ana", ABOUT, proof, NOW)


def test_nothing_and_noise_are_no_proof(here):
    proof_of(here, "ana")
    for noise in (b"", bytes(32), b"x" * 32):
        assert not here.has_token("ana", ABOUT, noise, NOW)
    with pytest.raises(tokens.TokenError):
        tokens.prove("no token", ABOUT)
