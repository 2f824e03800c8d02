"""The command `nebula`: its help, its secrets, and the commands that found a lab."""

import argparse
import pathlib
import re
import stat

import children
import nebula_command

from nebula_jax.security.membership import authority, invitations, revocation
from scripts import nebula

ROOT = pathlib.Path(__file__).parents[2]
SECRET = re.compile(r"password|token|secret|invitation|key")


def parsers(parser, way=()):
    """Every command with a parser of its own: (its words, the parser)."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield (*way, name), inner
                yield from parsers(inner, (*way, name))


ALL = list(parsers(nebula.parser()))


def test_the_command_loads_no_jax():
    """A switch has frames to carry and no arrays: it starts at once, in 50 MB. So does
    whoever imports the package."""
    code = "import sys; import scripts.nebula; print(*sys.modules)"
    done = children.python("-c", code)
    loaded = set(done.stdout.split())
    assert "nebula_jax.federation.server" in loaded, done.stderr
    assert not {"jax", "flax", "optax", "orbax"} & loaded


def test_every_command_and_argument_has_a_help_text():
    for way, parser in ALL:
        found = nebula_command.run(*way, "--help")
        assert (found.status, found.err) == (0, "")
        assert found.out.startswith(f"usage: nebula {' '.join(way)}")
        assert parser.description.endswith("."), way
        for action in parser._actions:
            is_group = isinstance(action, argparse._SubParsersAction)
            assert action.help or is_group, (way, action.dest)


def test_no_argument_takes_a_secret():
    """Arguments are in `ps` for all users of a machine: a secret comes in a file."""
    for way, parser in ALL:
        for action in parser._actions:
            assert not SECRET.search(action.dest), (way, action.dest)


def test_without_a_lab_each_command_names_the_way_to_one(tmp_path):
    for argv in (
        *(["account", "list"], ["data", "list"], ["grants"], ["audit", "show"]),
        *(["audit", "verify"], ["status"]),
    ):
        found = nebula_command.run(*argv, "--federation", tmp_path / "none")
        assert (found.status, found.out) == (1, ""), argv
        assert found.err.count("\n") == 1, argv
    assert (
        "nebula init"
        in nebula_command.run("grants", "--federation", tmp_path / "none").err
    )
    assert not (tmp_path / "none").exists()


def test_init_makes_a_folder_for_this_user_alone(tmp_path):
    path = tmp_path / "s"
    where = f"--federation={path}"
    found = nebula_command.run(where, "init", "--name", "lab-s")  # before or behind
    assert found.status == 0
    assert f"next: scripts/run nebula switch --listen 0.0.0.0:7070 {where}" in found.out
    assert re.search(r"fingerprint of its authority: [0-9a-f]{64}", found.out)
    for each in [path, *path.rglob("*")]:
        if each.is_dir() and not each.is_symlink():
            assert stat.S_IMODE(each.stat().st_mode) == 0o700, each
    for name in (
        "people.json",
        "authority/authority.pem",
        "authority/root.pem",
        "audit/key.pem",
    ):
        assert stat.S_IMODE((path / name).stat().st_mode) == 0o600, name
    assert (path / ".gitignore").read_text() == "*\n"  # wherever the folder is
    again = nebula_command.run("init", "--name", "lab-x", "--federation", path)
    assert again.status == 1
    assert again.err.count("\n") == 1
    bad = nebula_command.run("init", "--name", "../x", "--federation", tmp_path / "x")
    assert bad.status == 1
    assert "no lab's name" in bad.err


def test_an_invitation_is_written_for_this_user_alone(lab, tmp_path):
    path = tmp_path / "invitation"
    found = lab("invite", "lab-t", "--out", path)
    assert not found.out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert invitations.parse(path.read_text()).lab == "lab-t"


def test_git_takes_no_key_that_the_guides_have_made_in_a_checkout():
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"/federation*/", "/credentials/", "invitation", "cluster.key"} <= {*ignored}


def test_who_invites_a_member_or_its_own_lab_is_told_that_it_is_replaced(lab):
    authority.LocalAuthority(lab.folder).admit("lab-t")
    for name in ("lab-s", "lab-t"):
        words = f"{name} is a member: who uses this takes its place"
        assert words in lab("invite", name).err


def test_an_invitation_is_all_that_invite_prints(lab):
    found = lab("invite", "lab-t", "--address", "127.0.0.1:7070")
    assert re.fullmatch(r"nebula1\.[A-Za-z0-9_-]+\n", found.out)
    assert not found.err
    invitation = found.out.strip()
    assert invitation not in lab("audit", "show").out
    for path in lab.folder.path.rglob("*"):
        if path.is_file():
            assert invitation.encode() not in path.read_bytes(), path


def test_join_takes_the_invitation_from_standard_input(lab, tmp_path):
    text = lab("invite", "lab-t", "--address", "127.0.0.1:1").out
    join = ["join", "127.0.0.1:1", "--federation", tmp_path / "t", "--name"]
    found = nebula_command.run(*join, "lab-u", stdin=text)
    assert (found.status, found.err) == (
        *(2, "error: the invitation is for lab-t, not for lab-u\n"),
    )
    found = nebula_command.run(*join, "lab-t", stdin=text)
    assert found.status == 1
    assert "no switch answers there" in found.err
    assert text.strip() not in found.err
    del join[1]  # the invitation has the address too
    found = nebula_command.run(*join, "lab-t", stdin=text)
    assert "127.0.0.1:1: no switch answers there" in found.err
    for wrong in ("", "x" * 9000, text.strip() + "x" * 2000):
        assert "invitation" in nebula_command.run(*join, "lab-t", stdin=wrong).err


def test_the_authoritys_key_is_replaced_by_a_file_with_the_roots(lab, tmp_path):
    root = (lab.path / "authority" / "root.pem").rename(tmp_path / "root.pem")
    wrong = lab.path / "authority" / "authority.pem"
    assert "not the key of the federation's root" in lab.fails("rekey", wrong)
    assert lab("rekey", root).out.startswith("the key of the authority is new (list 2)")
    assert lab.kinds()[-1] == "certificate"


def test_revoke_is_recorded_once_its_list_is_in_force(lab, monkeypatch):
    lab("invite", "lab-t")
    assert "`nebula invite lab-s` makes" in lab.fails("revoke", "lab-s")
    with monkeypatch.context() as patched:
        patched.setattr(revocation.RevocationList, "accept", lambda *_: False)
        assert "list 2 is not in force" in lab.fails("revoke", "lab-t")
    assert lab.kinds()[-1] != "certificate"
    assert lab("revoke", "lab-t").out.startswith("lab-t is revoked (list 2)")
    assert lab.kinds()[-1] == "certificate"


def test_a_switch_has_to_run_and_to_have_somebody_to_connect_with(lab):
    for command in ("status", "rotate"):
        assert "nebula switch" in lab.fails(command)
    assert "--listen HOST:PORT, or --peer" in lab.fails("switch")
    found = lab("switch", "--peer", "nowhere:7070", status=2)
    assert "--peer=nowhere:7070: expected LAB=HOST:PORT" in found.err
