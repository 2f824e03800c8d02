"""A switch that uses everything in its reach: its process, its folder, its lines.

Trainers and the authority have folders of their own, as where they are other users'.
"""

import base64
import contextlib
import dataclasses
import json
import re
import shutil
import socket
import sys
import threading

import nebula_command
import pytest
import two_labs
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from lab_exchange import (
    discriminate,
    exchange_between,
    generate,
    name_of,
    rotate,
    run,
    values,
)

from nebula_jax import errors
from nebula_jax.communication import endpoints
from nebula_jax.communication.wire import frames
from nebula_jax.federation import inner, issuer, line
from nebula_jax.security import policy, private_files, seal
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.membership import authority, member, revocation, site_folder
from nebula_jax.security.tls import between_labs, certificates, credentials

DER = serialization.Encoding.DER


@dataclasses.dataclass
class Lab:
    """A lab whose switch has a folder without its trainers' and the authority's."""

    running: two_labs.Running
    folder: site_folder.Folder  # the trainers'
    stolen: site_folder.Folder  # the switch's

    @property
    def switch(self):
        return self.running.switch

    def run(self, work):
        return self.running.run(work)


def part(folder, path, name):
    """Moves a part of a lab's folder to one of its own; where that is."""
    path.mkdir(mode=0o700)
    shutil.copy(folder.path / "federation.json", path)
    (folder.path / name).rename(path / name)
    return site_folder.Folder(path)


def started(folder, path, **options):
    """A lab whose folder is split, and its switch running; trainers of the authority's
    lab are of the same host, those of the others of any."""
    users = path.with_suffix(".sock")
    own = part(folder, path, "trainers")
    if options.get("listens"):
        own.socket.symlink_to(users)
    else:
        own.inside.symlink_to(folder.inside)
    return Lab(two_labs.Running(folder, users=users, **options), own, folder)


@contextlib.contextmanager
def labs_of(path, names):
    """Yields labs, of which the first has the authority, in a process of its own."""
    first, made = two_labs.found(path / "s"), {}
    with contextlib.ExitStack() as stack:
        away = part(first, path / "ca", "authority")
        command = [sys.executable, "-m", "scripts.nebula", "authority"]
        process = issuer.Process([*command, f"--federation={away.path}"])
        ways = {"issuer": process.ask, "end": process.close}
        made["lab-s"] = started(first, path / "s-trainers", listens=True, **ways)
        stack.callback(made["lab-s"].running.stop)
        where = made["lab-s"].running.address
        for name in names[1:]:
            folder = two_labs.join(path / name, away, where, name)
            made[name] = started(
                folder, path / f"{name}-trainers", peers=[("lab-s", where)]
            )
            stack.callback(made[name].running.stop)
            made[name].running.wait_for_line("lab-s")
        yield made


TWO, THREE = ("lab-s", "lab-t"), ("lab-s", "lab-t", "lab-u")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(TWO, id="two"),
        pytest.param(THREE, id="three", marks=pytest.mark.slow),
    ],
)
def labs(request, tmp_path_factory):
    with labs_of(tmp_path_factory.mktemp("labs"), request.param) as made:
        yield made


def pairs(labs):
    """Each other lab with lab-s, in both directions."""
    for name in labs:
        if name != "lab-s":
            yield labs["lab-s"], labs[name]
            yield labs[name], labs["lab-s"]


def test_trainers_have_no_key_of_their_switch(labs):
    for lab in labs.values():
        assert {each.name for each in lab.folder.path.rglob("*.pem")} == {"trainer.pem"}
        assert [each.name for each in lab.stolen.inside.iterdir()] == ["switch.json"]


def test_trainers_exchange_and_replace_their_keys(labs):
    for number, (one, other) in enumerate(pairs(labs)):
        job = f"split-{number}"
        exchange_between(one, other, job=job)
        before = member.load(other.folder, "trainer").certificate.public_key()
        rotate(other)
        assert member.load(other.folder, "trainer").certificate.public_key() != before


def written_forms(path):
    """Bytes of which a file has some if it has the private key of another (PEM)."""
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    number = key.private_numbers().private_value
    scalar = number.to_bytes(32, "big")
    yield from (scalar, scalar[::-1], scalar.hex().encode(), str(number).encode())
    for shift in range(3):  # of the bytes before it, as in PEM
        # But for the ends, whose bits may be others' too; in a URL, two are others.
        coded = base64.b64encode(bytes(shift) + scalar)[4:-4]
        yield from (coded, coded.translate(bytes.maketrans(b"+/", b"-_")))


def has_part(folder, forms):
    """True if a file of a folder has one of some forms, however it breaks lines."""
    files = [each.read_bytes() for each in folder.rglob("*") if each.is_file()]
    joined = [re.sub(rb"\s|\\n", b"", each) for each in files]
    lower = [each.lower() for each in joined]  # of hexadecimal digits
    return any(form in each for form in forms for each in (*files, *joined, *lower))


def test_no_switch_has_a_key_of_trainers_or_authority(labs):
    """In any form, also as a part of a file: it reads all in its folder."""
    ca = labs["lab-s"].folder.path.parent / "ca" / "authority"
    keys = [ca / "authority.pem", ca / "root.pem"]
    keys += [lab.folder.trainer for lab in labs.values()]
    others = {form for each in keys for form in written_forms(each)}
    for lab in labs.values():
        assert has_part(lab.stolen.path, written_forms(lab.stolen.switch))
        assert not has_part(lab.stolen.path, others)
        assert not lab.stolen.trainers.exists()
        assert not lab.stolen.authority.exists()


def test_it_reads_nothing_of_what_it_carries(labs, monkeypatch):
    seen, send = [], line.Stream.send

    async def noted(self, data):
        seen.append(data)
        await send(self, data)

    monkeypatch.setattr(line.Stream, "send", noted)
    for number, (one, other) in enumerate(pairs(labs)):
        exchange_between(one, other, 5, job=f"read-{number}")
    carried = b"".join(seen)
    assert seal.MAGIC in carried  # it counts frames
    for step in range(1, 6):
        assert values(step).tobytes()[:16] not in carried


def test_it_changes_no_number_of_what_it_carries(labs, monkeypatch):
    """It alters a sealed frame, and puts in one that it has made up."""
    tensor = frames.Tensor(0, 1, 0, [values(666).tobytes()])
    parts = frames.encode(tensor, 1, 0, seal.Seal(bytes(32)))
    made_up = b"".join(map(bytes, parts))
    changes = {
        4: lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        9: lambda data: made_up + data,
    }
    seen, send = [], line.Stream.send

    async def wicked(self, data):
        if seal.MAGIC in data:
            seen.append(len(data))
            data = changes.get(len(seen), bytes)(data)
        await send(self, data)

    monkeypatch.setattr(line.Stream, "send", wicked)
    for number, (one, other) in enumerate(pairs(labs)):
        seen.clear()
        exchange_between(one, other, 10, job=f"changed-{number}")
        assert len(seen) > 9


def request(at, op, **fields):
    """Sends a request to the switch of a lab, whose token a switch has."""
    return inner.request(at.stolen, 20.0, op, **fields)[0]


def test_it_is_no_trainer_that_another_lab_dials(labs):
    """It serves the cluster itself, with the only key and certificate that it has."""
    for number, (one, other) in enumerate(pairs(labs)):
        job, met = f"served-{number}", []
        listening = endpoints.listen(("127.0.0.1", 0))

        def serve(listening=listening, met=met, lab=one):
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listening.accept()
                    context = between_labs.server_context(lab.stolen, "switch")
                    with contextlib.suppress(OSError):
                        secure = context.wrap_socket(sock, server_side=True)
                        met.append(secure.recv(seal.OFFER_BYTES))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listening.getsockname()[1]
        about = {"job": job, "from": "discriminator", "port": port, "shared": False}
        with (
            request(one, "serve", lab=name_of(other), **about),
            pytest.raises(errors.NebulaError, match=r"certificate|verify|TLS"),
        ):
            generate(other, 3, [], job=job, peer=name_of(one), connect_timeout=2.0)
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        assert not any(met)


def test_it_is_no_trainer_that_dials_another_lab(labs):
    for number, (one, other) in enumerate(pairs(labs)):
        job, failed, received = f"dialed-{number}", [], []

        def listen(lab=other, one=one, job=job, failed=failed, received=received):
            try:
                peer = name_of(one)
                discriminate(lab, 1, received, job=job, peer=peer, connect_timeout=4.0)
            except errors.NebulaError as error:
                failed.append(error)

        thread = threading.Thread(target=listen)
        thread.start()
        peer, key = other.switch.state.lab, (job, "discriminator")
        two_labs.wait_until(lambda key=key, at=other: key in at.switch.state.served)
        about = {"job": job, "from": "generator:0", "to": "discriminator", "lab": peer}
        sock = request(one, "dial", **about)
        context = between_labs.client_context(one.stolen, "switch")
        name = site_folder.trainer_name(peer)
        with contextlib.suppress(OSError):
            secure = context.wrap_socket(sock, server_hostname=name)
            secure.sendall(seal.offer(9, "generator:0", job).encode())
            secure.recv(seal.OFFER_BYTES)
            assert not secure.recv(1)  # it ends, and no frame comes
        thread.join(30)
        assert failed
        assert not received


def test_it_is_certified_as_no_trainer(labs):
    """It has a line to the authority, and the certificates of trainers, with no key."""
    for lab in labs.values():
        ours = member.renewal_request(lab.stolen, "switch")[1]
        found = member.own_certificate(lab.folder, "trainer")
        former = found.public_bytes(serialization.Encoding.PEM)
        with pytest.raises(errors.NebulaError, match=r"not signed|no certificate"):
            lab.run(lab.switch.upkeep.certified(ours._replace(certificate=former)))
        theirs = member.renewal_request(lab.folder, "trainer")[1]
        forged = theirs._replace(csr=member.new_request().csr)
        with pytest.raises(errors.NebulaError, match=r"not signed|no certificate"):
            lab.run(lab.switch.upkeep.certified(forged))


def test_who_has_the_authoritys_key_alone_is_nobody(labs):
    """What it signs in secret has no receipt, and vouches for nothing that would."""
    away = site_folder.Folder(labs["lab-s"].folder.path.parent / "ca")
    issuer = authority.LocalAuthority(away)
    for name, lab in labs.items():
        key, csr = member.new_request()
        pem = issuer.certify(csr, name, "trainer")
        der = x509.load_pem_x509_certificate(pem).public_bytes(DER)
        for other in labs.values():
            with pytest.raises(credentials.CredentialsError, match="no receipt") as why:
                between_labs.check_peer(der, other.stolen)
            assert why.value.reason == "unlogged"
        shown = x509.load_pem_x509_certificates(pem)
        text = certificates.pem(key, *shown).decode()
        ca = issuer.certificate().decode()
        lab.folder.trainer.rename(kept := lab.folder.path / "kept")
        private_files.write(lab.folder.trainer, text + ca)
        try:
            renewal = member.renewal_request(lab.folder, "trainer")[1]
            with pytest.raises(errors.NebulaError, match="not in this lab's log"):
                lab.run(lab.switch.upkeep.certified(renewal))
        finally:
            kept.rename(lab.folder.trainer)


def test_each_certificate_in_use_is_in_the_log_of_the_authoritys_lab(labs):
    entries = list(audit_entries.read(labs["lab-s"].stolen.audit))
    issued = {
        (each.what["lab"], each.what["role"], each.what["serial"])
        for each in entries
        if (each.kind, each.what.get("event")) == ("certificate", "issued")
    }
    for name, lab in labs.items():
        for folder, role in ((lab.stolen, "switch"), (lab.folder, "trainer")):
            serial = member.own_certificate(folder, role).serial_number
            assert (name, role, f"{serial:x}") in issued


def test_a_list_that_it_makes_up_is_not_taken_by_its_trainers(labs, monkeypatch):
    lab = labs["lab-t"]
    listed = revocation.RevocationList(lab.folder, "trainer")
    before = listed.number
    with pytest.raises(revocation.ListRefused):
        listed.accept("made up")
    assert listed.number == before


def run_unnamed(listening, dialing):
    """Runs a trainer of each lab, neither of which names a lab; what they say."""
    tokens, failed = run(listening, dialing, 3, connect_timeout=4.0, job="open")
    return tokens, " ".join(map(str, failed))


def test_one_other_lab_need_not_be_named_and_one_of_several_must(labs):
    """The first in the alphabet would get what is meant for another."""
    s, t = labs["lab-s"], labs["lab-t"]
    if len(labs) == 2:
        assert run_unnamed(s, t) == ([1, 2, 3], "")
        return
    two_labs.wait_until(lambda: {"lab-t", "lab-u"} <= set(s.switch.state.lines))
    for listening, dialing in ((s, t), (t, s)):
        tokens, said = run_unnamed(listening, dialing)
        assert not tokens
        assert "could be at any of lab-t, lab-u: give peer=NAME" in said
    rules = {"discriminator": ["lab-t"], "generator": ["lab-s"]}
    path = s.stolen.path / policy.FILE
    path.write_text(json.dumps({"jobs": {"open": {"labs": rules}}}))
    two_labs.wait_until(lambda: s.switch.state.rules.names_lab("open"))
    tokens, said = run_unnamed(t, s)
    assert not said
    assert tokens == [1, 2, 3]


def test_who_gets_a_jobs_data_is_printed_at_the_start(labs, capsys):
    exchange_between(labs["lab-s"], labs["lab-t"], 3, job="printed")
    printed = "".join(capsys.readouterr())
    assert "generator:0 is at lab-t" in printed
    assert "discriminator is at lab-s" in printed


def test_the_authoritys_key_is_replaced_while_labs_run(labs):
    away = site_folder.Folder(labs["lab-s"].folder.path.parent / "ca")
    made = nebula_command.run("rekey", away.root_key, "--federation", away.path)
    assert made.status == 0, made
    number = revocation.RevocationList(away).number
    for lab in labs.values():
        two_labs.wait_until(lambda lab=lab: lab.switch.upkeep.number == number)
    one, other = labs["lab-s"], labs["lab-t"]
    exchange_between(one, other, job="before")  # by certificates of the former key
    rotate(other)
    exchange_between(one, other, job="between")
    rotate(one)
    exchange_between(other, one, job="after")


def test_a_lab_is_revoked_where_the_authority_is_another_users(labs, tmp_path):
    """The last of all, since the lab does not come back."""
    away = labs["lab-s"].folder.path.parent / "ca"
    made = nebula_command.run("revoke", "lab-t", "--federation", away)
    assert made.status == 0, made
    lines = labs["lab-s"].switch.state.lines
    two_labs.wait_until(lambda: "lab-t" not in lines)
