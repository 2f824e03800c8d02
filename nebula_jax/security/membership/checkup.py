"""A checkup of a lab's folder: what is in order, what is not, and what to do.

Nothing is changed, and nothing but the folder is looked at.
"""

import datetime
from collections.abc import Callable
from typing import NamedTuple

from nebula_jax import errors, printable
from nebula_jax.security import policy, private_files
from nebula_jax.security.audit import verify as audit_verify
from nebula_jax.security.membership import member, revocation, site_folder

MOST_CLOCK_SECONDS = member.BACKDATED.total_seconds() / 2
"""A larger difference is wrong: with twice that, new certificates are not valid yet."""
LATE = 2 / 5  # of a certificate's life: by then its renewal has failed for a day
ISSUER_NOTICE = datetime.timedelta(days=60)
"""So long before its end it is said that the key that issues has to be replaced."""
OLD_LIST = 2 * 86400.0  # the authority signs a new list every day

FINE, WRONG, UNCLEAR = "ok", "wrong", "note"


class Check(NamedTuple):
    """A check and its result."""

    what: str  # what was looked at, in a word or two
    state: str  # FINE, WRONG, or UNCLEAR if it could not be found out or can wait
    text: str  # the result, and what to do if something is wrong

    def __str__(self) -> str:
        text = printable.line(self.text, printable.LINE_LIMIT)
        return f"{self.state:5}  {self.what}: {text}"


Found = tuple[str, str]
"""State and text of a check. One that raises an error is wrong, for that reason."""


def folder(found: site_folder.Folder) -> list[Check]:
    """Returns all checks of a lab's folder."""
    try:
        found.load()
    except errors.NebulaError as error:
        return [Check("folder", WRONG, str(error))]
    parts: dict[str, Callable[[], Found]] = {
        "folder": lambda: private(found),
        "certificate of the switch": lambda: certificate(found, "switch"),
        "certificate of the trainer": lambda: certificate(found, "trainer"),
        "key that issues": lambda: issuer(found),
        "key of its root": lambda: root(found),
        "revocation list": lambda: revocation_list(found),
        "policy": lambda: rules(found),
        "audit log": lambda: audit_log(found),
    }
    if not found.trainers.exists():  # they are elsewhere
        del parts["certificate of the trainer"]
    if not found.authority.exists():
        del parts["key of its root"]
    checks = []
    for what, part in parts.items():
        try:
            checks.append(Check(what, *part()))
        except (errors.NebulaError, OSError) as error:
            checks.append(Check(what, WRONG, str(error)))
    return checks


def private(found: site_folder.Folder) -> Found:
    """Checks that no other user of the machine can read what is secret."""
    found.check()
    private_files.folder(found.path)
    return FINE, f"{found.path}: only this user can read its secrets"


def certificate(found: site_folder.Folder, role: str) -> Found:
    """Checks the certificate of a role, and that its renewal is not late."""
    own, now = member.load(found, role).certificate, site_folder.utc_now()
    life = own.not_valid_after_utc - own.not_valid_before_utc
    renewal = own.not_valid_before_utc + life * member.RENEWAL
    text = f"valid for {duration(own.not_valid_after_utc - now)} more"
    if now < renewal:
        return FINE, f"{text}; its renewal is due in {duration(renewal - now)}"
    if now < own.not_valid_before_utc + life * LATE:
        return FINE, f"{text}; its renewal is due: a running {role} does it"
    return WRONG, (
        f"{text}, and its renewal is late: is the switch running, and does it reach"
        " that of the lab that issues certificates? then: nebula rotate"
    )


def issuer(found: site_folder.Folder) -> Found:
    """Checks that the key that issues certificates need not be replaced soon."""
    end = member.issuer(found).not_valid_after_utc
    if end - site_folder.utc_now() > ISSUER_NOTICE:
        return FINE, f"its certificate is valid until {end:%Y-%m-%d}"
    return WRONG, (
        f"its certificate ends on {end:%Y-%m-%d}, and all that it has issued: at the"
        " lab that issues certificates, nebula rekey root.pem, then everywhere nebula"
        " rotate"
    )


def root(found: site_folder.Folder) -> Found:
    """Checks that the root's key is not beside the key that it replaces."""
    if not found.root_key.exists():
        return FINE, "is kept elsewhere"
    return UNCLEAR, (
        f"{found.root_key} is online: who steals it is the authority for good; move it"
        " to where no network is, and bring it back for nebula rekey alone"
    )


def revocation_list(found: site_folder.Folder) -> Found:
    """Checks the revocation list, and that it is not old."""
    listed = revocation.RevocationList(found)
    listed.check()
    seconds = site_folder.utc_now().timestamp()
    age, left = seconds - listed.present().begin, listed.present().end - seconds
    text = f"number {listed.number}, {duration(age)} old"
    text += f", valid for {duration(left)} more"
    if age > OLD_LIST:
        more = "a newer one should have come; is the authority's switch running?"
        return WRONG, f"{text}: {more}"
    return FINE, text


def rules(found: site_folder.Folder) -> Found:
    """Checks that the policy can be read."""
    path = found.path / policy.FILE
    policy.load(path)
    return FINE, f"{path} serves" if path.exists() else "none: every job may cross"


def audit_log(found: site_folder.Folder) -> Found:
    """Verifies the audit log, by what this lab itself has signed."""
    findings = audit_verify.verify(found.audit)
    if not findings:
        return FINE, "its entries are as they were signed"
    return WRONG, f"{findings[0]}; see nebula audit verify"


def clocks(ahead: float, other: str) -> Check:
    """Compares this machine's clock with another's, by the seconds it is ahead of it.

    >>> clocks(-7.0, "that one").text
    "this machine's is 7 s behind that one"
    """
    way = "ahead of" if ahead > 0 else "behind"
    text = f"this machine's is {duration(abs(ahead))} {way} {other}"
    if abs(ahead) <= MOST_CLOCK_SECONDS:
        return Check("clocks", FINE, text)
    return Check("clocks", WRONG, f"{text}: set the wrong one by a time server (NTP)")


def duration(span: datetime.timedelta | float) -> str:
    """Returns a span of time, or of seconds, in words.

    >>> duration(datetime.timedelta(minutes=90)), duration(7)
    ('1.5 h', '7 s')
    """
    seconds = span.total_seconds() if isinstance(span, datetime.timedelta) else span
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(seconds) >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
