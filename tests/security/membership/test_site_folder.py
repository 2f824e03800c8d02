"""The folder of a lab: its paths and settings, and that nobody else can read it."""

import dataclasses
import json
import re
import stat
import subprocess

import lab_folders
import pytest

from nebula_jax.security import private_files
from nebula_jax.security.membership import site_folder

FINGERPRINT = "0f" * 32
ADDRESS = "lab-s.example:7070"


def settings_text(**changes):
    right = {"name": "a", "authority": "", "fingerprint": FINGERPRINT}
    right["version"] = site_folder.VERSION
    return json.dumps(right | changes)


@pytest.fixture
def folder(tmp_path):
    return site_folder.Folder(tmp_path / "federation")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_settings_are_read_as_they_were_written(folder):
    written = folder.create("lab-t", ADDRESS, FINGERPRINT)
    assert folder.load() == written
    assert written == site_folder.Settings("lab-t", ADDRESS, FINGERPRINT)
    assert json.loads(folder.settings.read_text()) == dataclasses.asdict(written)


@pytest.mark.parametrize("version", [None, 4, 7])
def test_a_folder_of_another_version_is_refused_before_anything_is_written(
    folder, version
):
    folder.create("lab-s", fingerprint=FINGERPRINT)
    found = json.loads(folder.settings.read_text())
    del found["version"]
    if version:
        found["version"] = version
    folder.settings.write_text(json.dumps(found))
    with pytest.raises(site_folder.FederationError, match="another version of Nebula"):
        folder.load()


def test_folders_are_for_this_user_alone(folder):
    folder.create("lab-s", fingerprint=FINGERPRINT)
    for path in (folder.path, folder.audit, folder.epochs):
        assert mode(path) == 0o700


def test_no_path_of_a_lab_can_be_read_by_others(tmp_path):
    labs = lab_folders.copy(tmp_path)
    for path in (labs.s.path, labs.t.path):
        secret = [path / "federation.json", *path.rglob("key.pem")]
        secret += [*path.rglob("switch.pem"), *path.rglob("trainer.pem")]
        secret += path.rglob("people.json")
        assert len(secret) > 2
        for each in path.rglob("*"):
            if each.is_dir():
                assert mode(each) == 0o700, each
            elif each in secret[1:]:
                assert mode(each) == 0o600, each


def test_git_sees_no_key_of_a_part_that_was_moved_into_a_checkout(tmp_path):
    labs = lab_folders.copy(tmp_path)
    for name in ("authority", "trainers"):
        (labs.s.path / name).rename(tmp_path / name)

    def git(*words):
        command = ["git", "-C", tmp_path, *words]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout

    git("init", "--quiet")
    assert not git("ls-files", "--others", "--exclude-standard")


@pytest.mark.parametrize(
    ("path", "bits", "right"),
    [
        ("", 0o750, "700"),
        ("", 0o701, "700"),
        ("authority", 0o755, "700"),
        ("authority/authority.pem", 0o640, "600"),
        ("authority/root.pem", 0o604, "600"),
        ("authority/ledger.json", 0o644, "600"),
        ("switch.pem", 0o604, "600"),
        ("trainers/trainer.pem", 0o620, "600"),
        ("people.json", 0o644, "600"),
        ("audit", 0o755, "700"),
        ("audit/key.pem", 0o644, "600"),
        ("inside/switch.json", 0o644, "600"),
    ],
)
def test_what_others_can_read_is_refused_with_the_command_that_mends_it(
    tmp_path, path, bits, right
):
    folder = lab_folders.copy(tmp_path).s
    target = folder.path / path
    if not target.exists():
        target.touch(0o600)
    folder.load()
    target.chmod(bits)
    words = f"(mode {bits:04o}): chmod {right} {target}"
    match = re.escape(words)
    with pytest.raises(private_files.PrivateFileError, match=match) as error:
        folder.load()
    assert "\n" not in str(error.value)
    target.chmod(int(right, 8))
    folder.load()


def test_the_command_can_be_typed_for_a_path_with_spaces(tmp_path):
    folder = site_folder.Folder(tmp_path / "two words")
    folder.create("lab-s", fingerprint=FINGERPRINT)
    folder.path.chmod(0o755)
    words = r"chmod 700 '.*two words'"
    with pytest.raises(private_files.PrivateFileError, match=words):
        folder.load()


def test_a_folder_that_is_open_already_is_not_filled(folder):
    folder.path.mkdir(mode=0o755)
    folder.path.chmod(0o755)
    with pytest.raises(private_files.PrivateFileError, match="chmod 700"):
        folder.create("lab-s", fingerprint=FINGERPRINT)
    assert not folder.settings.exists()


def test_a_second_attempt_replaces_the_first_until_there_are_credentials(tmp_path):
    folder = site_folder.Folder(tmp_path / "again")
    folder.create("lab-t", ADDRESS, FINGERPRINT)
    folder.create("lab-u", ADDRESS, FINGERPRINT)
    assert folder.load().name == "lab-u"
    labs = lab_folders.copy(tmp_path)
    with pytest.raises(site_folder.FederationError, match="lab lab-t is here already"):
        labs.t.create("lab-u", ADDRESS, FINGERPRINT)
    assert labs.t.load().name == "lab-t"


def test_where_no_lab_is(folder):
    with pytest.raises(site_folder.FederationError, match="begin with `nebula init`"):
        folder.load()
    folder.path.write_text("")
    with pytest.raises(site_folder.FederationError, match="File exists"):
        site_folder.Folder(folder.path).prepare()


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '{"name": "lab-s"}', "[" * 100_000, "\xff"),
        settings_text(fingerprint=1),
        settings_text(name="../evil"),
        settings_text(name="a:0"),
        settings_text(authority="a"),
        settings_text(fingerprint=FINGERPRINT[:-1]),
        settings_text(b=1),
    ],
)
def test_settings_that_are_damaged_are_refused_by_name(folder, text):
    folder.prepare()
    folder.settings.write_bytes(text.encode("latin-1"))
    with pytest.raises(site_folder.FederationError) as error:
        folder.load()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["lab-s", "s", "0", "university-1", "a" * 63])
def test_names_of_labs(name):
    assert site_folder.is_lab(name)
    assert site_folder.parse_name(name) == (name, "switch")
    assert site_folder.parse_name(f"trainer.{name}") == (name, "trainer")
    for role in site_folder.ROLES:
        there = site_folder.dns_name(name, role)
        assert site_folder.parse_name(there) == (name, role)


@pytest.mark.parametrize(
    "name",
    ["", "lab:0", "Lab", "lab.s", "-lab", "a" * 64, "*", "..", "lab\n", "ü", "a b"],
)
def test_what_is_no_labs_name(name):
    assert not site_folder.is_lab(name)
    with pytest.raises(site_folder.FederationError, match="is no lab's name"):
        site_folder.check_lab(name)
    assert site_folder.parse_name(name) is None
    assert site_folder.parse_name(f"trainer.{name}") is None


def test_a_trainers_name_is_not_its_labs(folder):
    assert site_folder.trainer_name("lab-s") == "trainer.lab-s"
    assert site_folder.parse_name("trainer.trainer.lab-s") is None
    assert site_folder.parse_name("trainer") == ("trainer", "switch")
    for unknown in ("", "ca", "Switch"):
        with pytest.raises(KeyError):
            site_folder.dns_name("lab-s", unknown)
        with pytest.raises(KeyError):
            folder.credentials(unknown)


@pytest.mark.parametrize(
    "text",
    [
        "lab-s.example:7070",
        "10.0.0.1:1",
        "[::1]:65535",
        "localhost:80",
        "a" * 255 + ":80",
    ],
)
def test_addresses(text):
    assert site_folder.is_address(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "host", "host:", ":80", "host:0", "host:65536", "host:080"),
        *(
            "a b:80",
            "a\n:80",
            "host:80\n",
            "-a:80",
            "host:٣",
            "::1:80:",
            "a" * 300 + ":80",
        ),
        "http://host:80",
    ],
)
def test_what_is_no_address(text):
    assert not site_folder.is_address(text)
