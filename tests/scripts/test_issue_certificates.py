import pytest
from absl.testing import flagsaver

from nebula_jax import errors
from nebula_jax.security import tls
from scripts import issue_certificates


def test_each_cluster_gets_credentials_that_load(tmp_path, capsys):
    out = tmp_path / "credentials"
    names = ["discriminator", "generator:0"]
    with flagsaver.flagsaver(out=str(out), clusters=names):
        assert issue_certificates.main() == 0
        with pytest.raises(errors.SettingsError, match="is there already"):
            issue_certificates.main()
    tls.server_contexts(out / "discriminator")()
    tls.client_contexts(out / "generator-0")()
    assert f"--tls={out / 'generator-0'}" in capsys.readouterr().out


def test_names_that_cannot_be_write_nothing(tmp_path):
    """What such names are: tests/security/test_names.py."""
    with pytest.raises(errors.SettingsError, match="are needed"):
        issue_certificates.main()
    out, names = str(tmp_path / "deep" / "credentials"), ["generator:0", "../generator"]
    with (
        flagsaver.flagsaver(out=out, clusters=names),
        pytest.raises(errors.SettingsError, match="is no cluster's name"),
    ):
        issue_certificates.main()
    assert not list(tmp_path.iterdir())
