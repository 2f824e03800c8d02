"""The pace of tries to log in: each failure makes the next try wait longer.

A try is counted before its password is hashed, and one that comes too early is not
hashed at all. So tries that run side by side, in whatever processes, are counted one
by one. After 5 that fail at once, the next wait 1, 2, 4, ... seconds and at most a
quarter of an hour each: 10,000 tries take more than 100 days.

The price: whoever tries wrong passwords of an account makes its person wait up to a
quarter of an hour to log in. Tokens that were given before go on.

Names without an account are counted too, in BUCKETS by their digest, since otherwise
the pace would reveal who has one; the table stays small whatever names are tried.
"""

import hashlib
import sqlite3

FREE = 5
"""Tries without a wait: a person's slips."""
LONGEST = 900.0  # seconds
BUCKETS = 1024


def wait(failures: int) -> float:
    """Returns the seconds from a try to the next, after so many that failed."""
    if failures < FREE:
        return 0.0
    return min(2.0 ** min(failures - FREE, 30), LONGEST)


def count(connection: sqlite3.Connection, who: str, now: float) -> float | None:
    """Counts a try, unless it comes too early.

    Args:
      connection: in a transaction that writes.
      who: the name of an account, or `bucket`.
      now: unix seconds.

    Returns:
      None if the password may be checked; else the time (unix seconds) from which on
      it may be, and the try is not counted.
    """
    row = connection.execute(
        "SELECT failures, retry_at FROM tries WHERE who = ?", (who,)
    ).fetchone()
    failures, retry_at = row or (0, 0.0)
    if now < retry_at:
        latest = now + LONGEST
        if retry_at > latest:  # the clock was set back: nobody waits for years
            retry_at = latest
            _keep(connection, who, failures, retry_at)
        return retry_at
    _keep(connection, who, failures + 1, now + wait(failures + 1))
    return None


def forget(connection: sqlite3.Connection, who: str) -> None:
    """Forgets the tries of an account whose password was right."""
    connection.execute("DELETE FROM tries WHERE who = ?", (who,))


def bucket(connection: sqlite3.Connection, name: str) -> str:
    """Returns under what a name without an account is counted.

    Args:
      connection: for the salt, without which nobody can find two names of one bucket.
      name: any text.
    """
    row = connection.execute("SELECT value FROM settings WHERE name = 'salt'")
    salt = row.fetchone()[0]
    digest = hashlib.sha256(salt + name.encode("utf-8", "surrogatepass")).digest()
    return f"?{int.from_bytes(digest[:8], 'big') % BUCKETS}"


def _keep(
    connection: sqlite3.Connection, who: str, failures: int, retry_at: float
) -> None:
    connection.execute(
        "INSERT INTO tries (who, failures, retry_at) VALUES (?, ?, ?)"
        " ON CONFLICT (who) DO UPDATE SET failures = excluded.failures,"
        " retry_at = excluded.retry_at",
        (who, failures, retry_at),
    )
