"""Makes the certificates by which the clusters of a run recognize each other.

    python -m scripts.issue_certificates --out=credentials --clusters=discriminator,generator:0,generator:1

Each cluster gets a folder of its own: carry it to that cluster's machine by a way you
trust, delete it here, and start the cluster with --tls=FOLDER. Certificates are valid
for 90 days. The authority's key is not kept, so no cluster can be added and no certificate
renewed: make them all at once.
"""  # noqa: E501

import pathlib

from absl import flags

from experiments import shared_flags
from nebula_jax import errors
from nebula_jax.security import names
from nebula_jax.security.tls import certificates


def main() -> int:
    """Writes --out."""
    given, clusters = (flags.FLAGS[name].value for name in ("out", "clusters"))
    if not given or not clusters:
        raise errors.SettingsError("--out=FOLDER and --clusters=NAME,NAME are needed")
    out = pathlib.Path(given)
    if out.exists():
        raise errors.SettingsError(f"--out={out} is there already")
    certificates.issue_for_run(out, clusters)
    for cluster in clusters:
        print(f"{cluster}: --tls={out / names.label(cluster)}")
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=["out", "clusters"])
