"""The keys of a lab's trainers, which make and replace them themselves.

The switch carries the request for a certificate, as it carries newer revocation lists,
which are signed. It can drop both, and gets no key and no certificate for one of its
own: a request is signed with the key of the certificate before (`member.Renewal`).
"""

from nebula_jax import errors
from nebula_jax.federation import inner
from nebula_jax.security.membership import member, revocation, site_folder
from nebula_jax.security.tls import credentials

ANSWER_SECONDS = 15.0
CERTIFY_SECONDS = 30.0  # for the authority, perhaps at another lab


def renew(folder: site_folder.Folder) -> None:
    """Replaces the trainers' key and certificate now; raises NebulaError or OSError."""
    made, renewal = member.renewal_request(folder, "trainer")
    answer = inner.ask(folder, CERTIFY_SECONDS, "certify", **renewal.fields())
    member.install(folder, "trainer", made.key, str(answer["pem"]).encode())


def refresh(folder: site_folder.Folder) -> None:
    """Gets a newer revocation list and certificate, if due; for errors see `renew`."""
    listed = revocation.RevocationList(folder, "trainer")
    number = listed.number
    answer = inner.ask(folder, ANSWER_SECONDS, "list", number=number)
    if text := answer.get("list"):
        listed.accept(str(text))
    own = member.own_certificate(folder, "trainer")
    if member.renewal_due(own):
        renew(folder)


def prepare(folder: site_folder.Folder) -> None:
    """Makes sure that this process can be a trainer; raises NebulaError if not."""
    folder.load()
    why = ""
    try:
        refresh(folder)
    except (errors.NebulaError, OSError) as error:
        why = str(error)
    try:
        member.load(folder, "trainer")
    except credentials.CredentialsError as error:
        if error.reason == "expired" and why:
            text = f"{error}; that failed: {why}"
            raise credentials.CredentialsError("expired", text) from None
        raise
