"""Makes the certificates by which the clusters of a run authenticate each other.

    python -m scripts.issue_certificates --out=credentials --clusters=discriminator,generator:0,generator:1

Each cluster gets a folder of its own: carry it to that cluster's machine by a way you
trust, delete it here, and start the cluster with --tls=FOLDER. Certificates are valid
for a year. The authority's key is not kept, so no cluster can be added and no certificate
renewed: make them all at once.
"""  # noqa: E501

import pathlib

from absl import flags

from experiments import lifecycle, shared_flags
from nebula_jax.security import certificates, tls
from scripts.out import OUT

CLUSTERS = flags.DEFINE_list(
    "clusters", [], "Names of the clusters, such as discriminator,generator:0."
)

flags.declare_key_flag("out")


def main() -> int:
    """Writes --out."""
    if not OUT.value or not CLUSTERS.value:
        raise shared_flags.FlagError("--out=FOLDER and --clusters=NAME,NAME are needed")
    out = pathlib.Path(OUT.value)
    if out.exists():
        raise shared_flags.FlagError(f"--out={out} is there already")
    certificates.issue_for_run(out, CLUSTERS.value)
    for cluster in CLUSTERS.value:
        print(f"{cluster}: --tls={out / tls.certificate_name(cluster)}")
    return 0


if __name__ == "__main__":
    lifecycle.run(main)
