"""The commands that make a federation: init, invite, join, authority, revoke."""

import argparse
import dataclasses
import pathlib
import socket
import sys
from typing import Any

from nebula_jax.federation import issuer as issuer_lib
from nebula_jax.federation import joining
from nebula_jax.runtime.life import process
from nebula_jax.security import accounts, private_files
from nebula_jax.security.membership import authority, invitations, member
from nebula_jax.security.membership import site_folder as federation_lib
from scripts.federation import arguments

PORT = 7070


@arguments.command(
    "init",
    arguments.option("--name", required=True, help="name of this lab, such as lab-s"),
)
def init(given: argparse.Namespace) -> int:
    """Founds a federation, with this as its first lab."""
    folder = arguments.folder(given)
    issuer = joining.found(folder, given.name)
    _begin(folder, given.name, "founded", fingerprint=issuer.fingerprint)
    print(f"{folder.path}: {given.name} has founded a federation.")
    print(f"fingerprint of its authority: {issuer.fingerprint}")
    print(f"{folder.root_key} replaces its key once a year: keep it offline till then")
    print(f"next: {arguments.again(given, f'switch --listen 0.0.0.0:{PORT}')}")
    invite = arguments.again(given, "invite lab-t --out invitation")
    print(f"      {invite}    (for another lab)")
    return 0


@arguments.command(
    "invite",
    arguments.option("lab", help="name that the lab will have, such as lab-t"),
    arguments.option(
        "--address",
        default="",
        metavar="HOST:PORT",
        help=f"of this lab's switch, as others reach it (default: HOSTNAME:{PORT})",
    ),
    arguments.file_option("--out", "to write it to, for this user alone"),
)
def invite(given: argparse.Namespace) -> int:
    """Invites a lab: prints an invitation, for one use within an hour."""
    folder = arguments.folder(given)
    address = given.address or f"{socket.getfqdn()}:{PORT}"
    issuer = authority.LocalAuthority(folder)
    text = issuer.invite(given.lab, address)
    if given.lab in issuer.members():
        process.message(
            f"{given.lab} is a member: who uses this takes its place, and its present"
            " certificates are revoked"
        )
    _record(folder, "federation", event="invited", lab=given.lab)
    if given.out is None:
        print(text)
    else:
        private_files.write(given.out, text + "\n")
    return 0


@arguments.command(
    "join",
    arguments.option(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        help="of the switch to join at (default: the invitation's)",
    ),
    arguments.option("--name", required=True, help="name of this lab, such as lab-t"),
)
def join(given: argparse.Namespace) -> int:
    """Joins a federation, with an invitation from standard input."""
    folder = arguments.folder(given)
    try:  # one more than an invitation may have: what is too long is none
        text = sys.stdin.readline(invitations.MOST_CHARACTERS + 1)
    except UnicodeDecodeError:
        text = ""
    invitation = invitations.parse(text)
    if invitation.lab != given.name:
        raise arguments.InputError(
            f"the invitation is for {invitation.lab}, not for {given.name}"
        )
    address = given.address or invitation.address
    invitation = dataclasses.replace(invitation, address=address)
    are_trainers_elsewhere = folder.switch.exists() and not folder.trainer.exists()
    joining.join(folder, invitation)
    _begin(folder, given.name, "joined", authority=address)
    print(f"{folder.path}: {given.name} has joined the federation.")
    if are_trainers_elsewhere:
        print(f"next: {folder.trainer} replaces the one in the trainers' own folder")
    first = member.issuing_lab(member.pinned_authority(folder))
    if first == given.name:
        return 0
    print(f"next: {arguments.again(given, f'switch --peer {first}={address}')}")
    print(
        "      for each further lab with which this one trains: one of both switches"
        " has --listen, the other that lab and address as one more --peer"
    )
    return 0


@arguments.command("authority")
def serve_authority(given: argparse.Namespace) -> int:
    """Answers the requests of a switch on standard input, as `nebula switch` has it."""
    private_files.keep_out_of_core_dumps()
    made = authority.LocalAuthority(arguments.folder(given))
    issuer_lib.serve(made, sys.stdin.buffer, sys.stdout.buffer)
    return 0


@arguments.command(
    "rekey",
    arguments.option("root", type=pathlib.Path, help="file with the root's key"),
)
def rekey(given: argparse.Namespace) -> int:
    """Replaces the authority's key by one that its root signs; no lab joins again."""
    folder = arguments.folder(given)
    number = authority.LocalAuthority(folder).replace_key(
        private_files.read(given.root).encode()
    )
    _record(folder, "certificate", event="rekeyed", number=number)
    print(f"the key of the authority is new (list {number}); take {given.root} offline")
    return 0


@arguments.command("revoke", arguments.option("lab", help="name of the lab"))
def revoke(given: argparse.Namespace) -> int:
    """Revokes a lab's certificates: its connections end within two seconds."""
    folder = arguments.folder(given)
    number = authority.LocalAuthority(folder).revoke(given.lab)
    _record(folder, "certificate", event="revoked", lab=given.lab)
    print(f"{given.lab} is revoked (list {number}); running switches act on it now")
    return 0


def _record(folder: federation_lib.Folder, kind: str, **what: Any) -> None:
    """Puts an entry into the log of this lab, unless that is another user's."""
    if folder.audit.exists():
        arguments.record(folder, kind, **what)


def _begin(folder: federation_lib.Folder, lab: str, event: str, **what: str) -> None:
    """Makes the accounts and the audit log of a new lab."""
    accounts.Accounts.begin(folder.path)
    arguments.record(folder, "federation", event=event, lab=lab, **what)
