import re

import pytest
from absl import flags
from absl.testing import flagsaver

from nebula_jax import errors
from nebula_jax.security import tls
from scripts import issue_certificates


def test_each_cluster_gets_credentials_that_load(tmp_path, capsys):
    flags.FLAGS(["test"])
    out = tmp_path / "credentials"
    names = ["discriminator", "generator:0"]
    with flagsaver.flagsaver(out=str(out), clusters=names):
        assert issue_certificates.main() == 0
        with pytest.raises(errors.SettingsError, match="is there already"):
            issue_certificates.main()
    tls.server_contexts(out / "discriminator")()
    tls.client_contexts(out / "generator-0")()
    assert f"--tls={out / 'generator-0'}" in capsys.readouterr().out


def test_names_are_needed():
    flags.FLAGS(["test"])
    with pytest.raises(errors.SettingsError, match="are needed"):
        issue_certificates.main()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["../../evil"], "'../../evil' is no cluster's name"),
        (["generator:0", "../generator"], "'../generator' is no cluster's name"),
        (["generator:0", "generator-0"], "would have the same certificate"),
        (["source", "source"], "would have the same certificate"),
        (["a" * 64], "is no cluster's name"),
    ],
)
def test_names_that_cannot_be_write_nothing(tmp_path, names, words):
    flags.FLAGS(["test"])
    out = tmp_path / "deep" / "credentials"
    with (
        flagsaver.flagsaver(out=str(out), clusters=names),
        pytest.raises(errors.SettingsError, match=re.escape(words)),
    ):
        issue_certificates.main()
    assert not list(tmp_path.iterdir())
