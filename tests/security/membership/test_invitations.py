"""Invitations: one use, one hour, one name, and no word of the secret anywhere."""

import base64
import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import lab_folders
import pytest
from lab_folders import at, redeem

from nebula_jax import files
from nebula_jax.security import private_files
from nebula_jax.security.membership import authority, invitations, site_folder

NOW = datetime.datetime(2026, 5, 4, 12, 0, 0, 250_000, tzinfo=datetime.UTC)
SECOND = datetime.timedelta(seconds=1)
HOUR = datetime.timedelta(hours=1)
ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(site_folder, "utc_now", lambda: NOW)


@pytest.fixture
def issuer(tmp_path):
    return lab_folders.create(tmp_path / "s")


@pytest.fixture
def line(issuer):
    return issuer.invite("lab-t", lab_folders.ADDRESS)


def refused(issuer, secret, reason, lab="lab-t", now=NOW):
    members = issuer.members()
    with pytest.raises(site_folder.Refusal) as error:
        at(now, redeem, issuer, secret, lab)
    assert error.value.reason == reason
    assert issuer.members() == members


def secret_of(line):
    return invitations.parse(line).secret


def test_an_invitation_is_one_line_that_has_all_that_a_lab_needs(issuer, line):
    assert line.isascii()
    assert len(line.split()) == 1
    assert line.startswith("nebula1.")
    assert len(line) < 500
    found = invitations.parse(f"  {line}\n")
    assert (found.lab, found.address) == ("lab-t", lab_folders.ADDRESS)
    assert found.fingerprint == issuer.fingerprint
    assert found.expires == NOW.replace(microsecond=0) + HOUR
    assert len(found.secret) == 32
    assert found.text() == line


def test_an_invitation_is_used_once(issuer, line):
    at(NOW + HOUR - SECOND, redeem, issuer, secret_of(line), "lab-t")
    assert issuer.members() == ["lab-s", "lab-t"]
    refused(issuer, secret_of(line), "unknown")
    again = authority.LocalAuthority(site_folder.Folder(_folder(issuer)))
    refused(again, secret_of(line), "unknown")


def _folder(issuer):
    return issuer._folder.path


def test_an_invitation_lasts_an_hour(issuer, line):
    refused(issuer, secret_of(line), "expired", now=NOW + HOUR)
    refused(issuer, secret_of(line), "expired", now=NOW + 24 * HOUR)
    with pytest.raises(site_folder.Refusal, match="expired at") as error:
        at(NOW + HOUR, invitations.parse, line)
    assert error.value.reason == "expired"


def test_an_invitation_is_for_one_name(issuer, line):
    for other in ("lab-u", "lab-s", "trainer.lab-t", ""):
        refused(issuer, secret_of(line), "wrong_name", lab=other)
    redeem(issuer, secret_of(line), "lab-t")


def test_a_newer_invitation_replaces_the_older_one(issuer, line):
    newer = issuer.invite("lab-t", lab_folders.ADDRESS)
    refused(issuer, secret_of(line), "unknown")
    redeem(issuer, secret_of(newer), "lab-t")


def test_lab_folders_are_invited_at_once(issuer, line):
    other = issuer.invite("lab-u", lab_folders.ADDRESS)
    redeem(issuer, secret_of(other), "lab-u")
    redeem(issuer, secret_of(line), "lab-t")
    assert issuer.members() == ["lab-s", "lab-t", "lab-u"]


def test_a_wrong_secret_admits_nobody_and_voids_nothing(issuer, line):
    """Whoever knows a lab's name could else void its invitation."""
    right = secret_of(line)
    near = bytes([right[0] ^ 1, *right[1:]])
    for guess in [near, right[:-1], right + b"\0", b""] + 20 * [os.urandom(32)]:
        refused(issuer, guess, "unknown")
    redeem(issuer, right, "lab-t")


def test_who_carries_a_request_to_join_puts_in_no_other(issuer, line):
    """It would be the lab: with a key of its own, certified under that name."""
    secret, own, forged = secret_of(line), [b"own"], [b"forged"]
    claim = invitations.claim(secret, "lab-t", own)
    assert secret not in (*claim, hashlib.sha256(secret).digest())
    with pytest.raises(site_folder.Refusal, match="no such invitation"):
        issuer.redeem(claim, "lab-t", forged)
    issuer.redeem(claim, "lab-t", own)


def test_the_disk_has_only_a_digest_of_the_secret(issuer, line):
    redeem(issuer, secret_of(line), "lab-t")
    other = issuer.invite("lab-u", lab_folders.ADDRESS)
    for secret in (secret_of(line), secret_of(other)):
        for path in _folder(issuer).rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                assert secret not in data
                assert secret.hex().encode() not in data


def test_no_text_of_an_invitation_or_an_error_has_the_secret(issuer, line):
    found = invitations.parse(line)
    parts = (found.secret.hex(), repr(found.secret), line[8:40], line[-40:])
    texts = [repr(found), str(found), f"{found}"]
    for damaged in (line[:-1], line + "A", line[:60], line.upper()):
        with pytest.raises(site_folder.Refusal) as error:
            invitations.parse(damaged)
        texts += [str(error.value), repr(error.value)]
    for lab in ("lab-t", "lab-u", "lab-t"):
        try:
            redeem(issuer, found.secret, lab)
        except site_folder.Refusal as error:
            texts += [str(error), repr(error)]
    assert len(texts) > 12
    assert not [(text, part) for text in texts for part in parts if part in text]


def encoded(body, check=None):
    """The text of an invitation with any body."""
    check = invitations._check_bytes(body) if check is None else check
    data = base64.urlsafe_b64encode(body + check).decode().rstrip("=")
    return f"nebula1.{data}"


def changed(line, **values):
    """An invitation with other values."""
    data = line.removeprefix("nebula1.")
    body = base64.urlsafe_b64decode(data + "=" * (-len(data) % 4))[:-4]
    return encoded(json.dumps(json.loads(body) | values).encode())


def test_every_damaged_line_is_refused(line):
    assert invitations.parse(changed(line)) == invitations.parse(line)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    damaged = [line[:count] for count in range(len(line) - 1)]
    for place in range(8, len(line) - 1):
        other = alphabet[(alphabet.index(line[place]) + 1) % 64]
        damaged.append(line[:place] + other + line[place + 1 :])
    for text in damaged:
        with pytest.raises(site_folder.Refusal) as error:
            invitations.parse(text)
        assert error.value.reason == "malformed"


@pytest.mark.parametrize(
    "values",
    [
        *({"address": each} for each in (1, "", "host", "a b:1", None, "http://a:1")),
        *({"fingerprint": each} for each in (1, "", "0f" * 31, "0F" * 32, None)),
        *({"lab": each} for each in (1, "", "lab:0", "../evil", None, ["lab-t"])),
        *({"expires": each} for each in ("now", None, 10**20, float("nan"), -(10**20))),
        *({"secret": each} for each in (1, "", "0f" * 31, "zz" * 32, None)),
    ],
    ids=str,
)
def test_every_bad_value_is_refused(line, values):
    with pytest.raises(site_folder.Refusal, match="is damaged"):
        invitations.parse(changed(line, **values))


@pytest.mark.parametrize(
    "text",
    [
        *("", "nebula1", "nebula2.AAAA", "hello", "nebula1." + "A" * 3000, "\0", "ü"),
        *("nebula1.", "nebula1.ü", "nebula1.A", "nebula1.AA AA"),
        *(encoded(body) for body in (b"", b"[]", b"null", b"{}", b"{", b"[" * 1000)),
        encoded(b"\xff"),
        encoded(b"{}", b"1234"),
    ],
)
def test_what_is_no_invitation(text):
    with pytest.raises(site_folder.Refusal) as error:
        invitations.parse(text)
    assert error.value.reason == "malformed"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lab", "address"), [("lab:0", "a:1"), ("", "a:1"), ("lab-t", "a"), ("lab-t", "")]
)
def test_nobody_is_invited_by_a_bad_name_or_to_a_bad_address(issuer, lab, address):
    with pytest.raises(site_folder.FederationError):
        issuer.invite(lab, address)


RACER = """
import datetime, pathlib, sys
from nebula_jax.security.membership import authority, invitations, site_folder
handle = authority.LocalAuthority(site_folder.Folder(pathlib.Path(sys.argv[1])))
now = datetime.datetime.fromisoformat(sys.argv[2])
site_folder.utc_now = lambda: now
print("ready", flush=True)
for line in sys.stdin:
    found = invitations.parse(line)
    try:
        claim = invitations.claim(found.secret, found.lab, [])
        handle.redeem(claim, found.lab, [])
        print("admitted", flush=True)
    except site_folder.Refusal as error:
        print(error.reason, flush=True)
"""


def test_of_two_processes_with_one_invitation_one_joins(issuer):
    command = [sys.executable, "-c", RACER, str(_folder(issuer)), NOW.isoformat()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        racers = [
            stack.enter_context(subprocess.Popen(command, env=environment, **pipes))
            for _ in range(2)
        ]
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for number in range(20):
            line = issuer.invite(f"lab-{number}", lab_folders.ADDRESS)
            for racer in racers:
                racer.stdin.write(f"{line}\n")
                racer.stdin.flush()
            found = {racer.stdout.readline() for racer in racers}
            assert found == {"admitted\n", "unknown\n"}


def test_a_redemption_that_fails_is_undone(issuer, line, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    secret = secret_of(line)
    with monkeypatch.context() as patched:
        patched.setattr(files, "writing", full)
        with pytest.raises(private_files.PrivateFileError, match="No space"):
            redeem(issuer, secret, "lab-t")
    assert issuer.members() == ["lab-s"]
    redeem(issuer, secret_of(line), "lab-t")
