"""The key of a lab's audit log: made with the log, and never replaced."""

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from nebula_jax.security import private_files
from nebula_jax.security.audit import checkpoint_note
from nebula_jax.security.audit import files as audit_files


def load(paths: audit_files.Paths, lab: str) -> ed25519.Ed25519PrivateKey:
    """Returns the key of a lab's log; makes it for a new log, with its public half.

    Args:
      paths: of the log.
      lab: whose it is.

    Raises:
      audit_files.AuditError: if it is missing, no key, or that of another log.
      private_files.PrivateFileError: if others can use it.
      OSError: if the disk fails.
    """
    if not paths.key.exists():
        if paths.log.exists() and paths.log.stat().st_size:
            raise audit_files.AuditError(
                f"{paths.key}: is missing: this log can be read and verified, but not"
                f" continued; move {paths.key.parent} away to begin another"
            )
        private_files.write(paths.key, _pem(ed25519.Ed25519PrivateKey.generate()))
    try:
        text = private_files.read(paths.key).encode()
        key = serialization.load_pem_private_key(text, None)
    except (TypeError, ValueError):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise audit_files.AuditError(
            f"{paths.key}: is no private key of Ed25519 without a password"
        )
    _check_verifier(paths, verifier(lab, key))
    return key


def verifier(lab: str, key: ed25519.Ed25519PrivateKey) -> checkpoint_note.Verifier:
    """Returns the public key of a lab's log.

    Raises:
      checkpoint_note.NoteError: if no lab can have this name.
    """
    return checkpoint_note.verifier(
        checkpoint_note.origin(lab), checkpoint_note.LOG, key
    )


def _check_verifier(
    paths: audit_files.Paths, expected: checkpoint_note.Verifier
) -> None:
    """Compares the public key beside the private one; writes it if it is missing."""
    text = f"{expected.text}\n"
    if not paths.verifier.exists():
        private_files.write(paths.verifier, text)
    elif paths.verifier.read_bytes() != text.encode():
        raise audit_files.AuditError(
            f"{paths.verifier}: is the public key of another log than that of"
            f" {expected.name} with {paths.key.name}"
        )


def _pem(key: ed25519.Ed25519PrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
