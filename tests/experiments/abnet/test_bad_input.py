"""Bad input to train_abnet: one clear line on the side at fault, nothing that hangs."""

import concurrent.futures
import dataclasses
import gzip
import re
import shutil
import time

import numpy as np
import ports
import pytest
import tiny_translations
from absl import flags
from absl.testing import flagsaver

from experiments import train_abnet
from experiments.abnet import channels, data, sides, source, target, target_model
from nebula_jax import errors, files
from nebula_jax.communication import loopback
from nebula_jax.communication.wire import frames
from nebula_jax.data import split_parallel, tokenizers
from nebula_jax.models import transformer


@pytest.fixture(scope="module")
def own_text(runs):
    """The folders of source and target, as scripts/split_parallel.py makes them."""
    return split_parallel.split(runs.text, ("es", "en"), runs.folder / "own")


@pytest.fixture
def here(runs, monkeypatch, signals):
    """Makes this process one that could be given flags."""
    monkeypatch.chdir(runs.folder)
    flags.FLAGS(["test"])
    names = {"devices_per_cluster": 0, "length_buckets": ["8", "16"], "workdir": "bad"}
    given = {"steps": 2, "micro_batches": 2, "batch_size": 8}
    with flagsaver.flagsaver(**runs.flags() | names | given):
        yield


def configured(**values):
    """The configuration of a tiny run."""
    return tiny_translations.run(**tiny_translations.TINY | values)


def fails_here(words, **values):
    """Asserts that the command, in this process, says so before anything crosses."""
    with (
        flagsaver.flagsaver(**values),
        pytest.raises(errors.NebulaError, match=re.escape(words)),
    ):
        train_abnet.main()


ALONE = {"cluster": "source", "peer": "h:1", "tls": "off", "side_dir": "source_side"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cluster": "teacher"}, "--cluster=teacher: expected all, whole, source or"),
        ({"pair": "es"}, "--pair=es: expected two, such as es-en"),
        ({"pair": "-en"}, "--pair=-en: expected two, such as es-en"),
        ({"pair": "es-de"}, "the pair 'es-de' has no text"),
        ({"pair": "fr-en"}, "the pair 'fr-en' has no text"),
        ({"length_buckets": []}, "--length_buckets=: must ascend"),
        ({"length_buckets": ["2"]}, "--length_buckets=2: must ascend, from 4 or more"),
        ({"length_buckets": ["8", "64"]}, "models/spanish has 16 positions"),
        (
            {"objective": "cmlm", "beams": 15},
            "--beams=15: with --objective=cmlm these are lengths of a translation, of"
            " which --length_buckets=16 leaves 14",
        ),
        ({"micro_batches": 3}, "micro_batches=3 does not divide batch_size=8"),
        ({"devices_per_cluster": 8}, "a micro-batch of 4 (batch_size=8, micro"),
        ({"cross_attention_heads": 5, "cluster": "whole"}, "heads=5 does not divide"),
        ({"forward_codec": "fp15"}, "unknown codec fp15"),
        ({"backward_codec": "int8("}, "int8("),
        ({"wan": "fast"}, "cannot read 'fast'"),
        ({"side_dir": "own"}, "--side_dir is for one cluster"),
        (ALONE | {"side_dir": ""}, "--cluster=source needs --side_dir=FOLDER"),
        (ALONE | {"peer": ""}, "cluster=source needs peer=HOST:PORT with 1 address"),
        (ALONE, "source_side: train.tsv.gz is missing"),
        ({"cluster": "target", "tls": "off"}, "needs listen=HOST:PORT"),
        ({"source_model": "./nowhere"}, "nowhere is no folder"),
        ({"source_model": "text"}, "text/config.json: No such file"),
        ({"target_model": "no-such-model"}, "no-such-model"),
        ({"data_dir": "nowhere"}, "the pair 'es-en' has no text"),
        ({"corpora": ["web"]}, "no column 'source'"),
    ],
)
def test_what_cannot_work_is_refused_in_words(runs, here, values, words):
    fails_here(words, **values)


PACKS = "pack_ids would cut the numbers of examples, and the bits of length logits"


@pytest.mark.parametrize(
    ("which", "codec", "words"),
    [
        ("forward_codec", "pack_tokens(index)", "'index' must be bool or integer"),
        ("backward_codec", "from_step(2,pack_tokens(nope))", "must be called 'nope'"),
        ("forward_codec", "pack_tokens|pack_ids(32768)|fp16", PACKS),
        ("backward_codec", "from_step(2, pack_ids(2147483648))", PACKS),
    ],
)
def test_a_codec_that_is_not_for_what_crosses(which, codec, words):
    """Both sides find out when they open the channels, before anything crosses."""
    agreed = configured(**{which: codec}).agreed
    words = re.escape(f"--{which}={codec}: ") + ".*" + re.escape(words)
    for role, end in zip(("source", "target"), loopback.ends(), strict=True):
        with pytest.raises(errors.SettingsError, match=words):
            channels.open_ends(agreed, end, role, 60, 16)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("pack_tokens|hadamard|int4(64)|fp16", "fp16"),
        ("from_step(3, pack_tokens|svd(0.6)|fp16)", "sparse_loco(2, 16)|fp16"),
    ],
)
def test_bits_of_length_logits_and_numbers_of_examples_come_as_they_are(
    forward, backward
):
    run = configured(
        objective="cmlm",
        length_buckets="16",
        forward_codec=forward,
        backward_codec=backward,
    )
    row = channels.table(run.agreed, 60, 16)[-1]
    source, target = loopback.ends()
    sender = source.sender(row.name, row.spec, row.codec)
    receiver = target.receiver(row.name, row.spec, row.codec, check=row.check)
    sent = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in row.spec.items()}
    sent["index"] -= 1
    sent["mask"][:, :3] = True
    logits = np.linspace(-3, 3, sent["length_logits"].size, dtype=np.float32)
    logits[::3] = -np.inf
    sent["length_logits"] = logits.reshape(sent["length_logits"].shape).view(np.int32)
    sender.send(1, sent)
    got = receiver.recv(1)
    for name in ("index", "mask", "length_logits"):
        np.testing.assert_array_equal(got[name], sent[name])


@pytest.mark.parametrize("longer", [0, 1])
def test_an_overlong_sentence_is_named_by_its_id_or_cut(
    runs, here, tmp_path, capfd, longer
):
    """19 tokens where the last bucket has 16, on either side."""
    pair = ["the house", "la casa"]
    pair[longer] += " 3" * 15
    text, values = tmp_path / "text", {"cluster": "whole"}
    shutil.copytree(runs.text, text)
    with (text / "parallel" / "en-es.train.tsv").open("a") as stream:
        stream.write("\t".join(pair) + "\n")
    values |= {"data_dir": str(text), "workdir": str(tmp_path / "run")}
    words = "'train-000061' has 19 tokens; at most 16 are allowed; --truncate cuts"
    fails_here(words, **values)
    folder = [*(runs.folder / "prepared" / "sides").iterdir()]
    folder = max(folder, key=lambda path: path.stat().st_mtime)
    side = ("target", "source")[longer]
    model = ("english", "spanish")[longer]
    tokenizer = tokenizers.load(runs.folder / "models" / model)
    run = configured(prepared_dir=tmp_path / "prepared")
    cut = run.with_local(truncate=True)
    read = data.read(cut, folder / side, tokenizer, is_translated=False)
    assert read.train.lengths.max() == 16
    # What is only translated is cut without asking.
    shutil.copyfile(folder / side / "train.tsv.gz", folder / side / "dev.tsv.gz")
    read = data.read(cut, folder / side, tokenizer, is_translated=True)
    with pytest.raises(errors.NebulaError, match="has 19 tokens"):
        data.read(run, folder / side, tokenizer, is_translated=True)
    assert "1 of 61 sentences were cut: train-000061" in capfd.readouterr().err


def errors_of(runs, folders, **flags):
    """Trains both sides in threads, each on its folder; their errors, source first."""
    address = f"127.0.0.1:{ports.free_port()}"
    given = runs.flags() | {"steps": 2, "tls": "off"} | flags
    ways = (
        (source, {"cluster": "source", "peer": address}),
        (target, {"cluster": "target", "listen": address}),
    )
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ends = [
            pool.submit(
                side.train, tiny_translations.run(**given | way, side_dir=folder)
            )
            for (side, way), folder in zip(ways, folders, strict=True)
        ]
        found = [each.exception(timeout=110) for each in ends]
    assert all(isinstance(each, errors.NebulaError) for each in found), found
    return map(str, found)


def test_sides_that_do_not_hold_the_same_examples_name_the_one(
    runs, own_text, tmp_path, monkeypatch
):
    monkeypatch.chdir(runs.folder)
    shutil.copytree(own_text[0], tmp_path / "source")
    train = tmp_path / "source" / "train.tsv.gz"
    lines = gzip.decompress(train.read_bytes()).decode().splitlines(keepends=True)
    more = [*lines[:10], *lines[11:], "train-000999\tla casa\n"]
    train.write_bytes(gzip.compress("".join(more).encode()))
    folders, start = (tmp_path / "source", own_text[1]), time.monotonic()
    first, second = errors_of(runs, folders, workdir="examples")
    assert time.monotonic() - start < 50, "one of them only gave up waiting"
    assert "example 'train-000999' of train is on this side only" in first
    assert "example 'train-000010' of train is on this side only" in second
    assert not list((runs.folder / "examples").rglob("0000*"))


def test_hidden_states_of_other_examples_are_refused(runs, own_text, monkeypatch):
    """Of a source whose batches are one ahead, by a fault that no setting shows."""
    monkeypatch.chdir(runs.folder)
    of_step = data.SourceBatches.at
    monkeypatch.setattr(
        data.SourceBatches, "at", lambda self, step: of_step(self, step + 1)
    )
    given = tiny_translations.ALIKE | {"length_buckets": "16", "workdir": "ahead"}
    for error in errors_of(runs, own_text, **given):
        assert "sent hidden states of other examples than step 1 has" in error


@pytest.mark.parametrize(
    ("name", "good", "bad", "words"),
    [
        ("buckets", [0, 1, 1], [0, 1, 2], r"2 is not in \[0, 2\)"),
        ("lengths", [1, 16, 3], [1, 0, 3], r"0 is not in \[1, 17\)"),
        ("lengths", [1, 16, 3], [1, 17, 3], r"17 is not in \[0, 17\)"),
    ],
)
def test_buckets_and_lengths_that_cannot_be_are_refused(name, good, bad, words):
    run = configured(length_buckets="8,16", batch_size=2, micro_batches=1)
    agreed, carriers = run.agreed, loopback.ends()
    ends = {
        role: channels.open_ends(agreed, carrier, role, 3, 4)
        for role, carrier in zip(("source", "target"), carriers, strict=True)
    }
    away, here = ("source", "target") if name == "buckets" else ("target", "source")
    dtype = np.uint8 if name == "buckets" else np.int32
    sender, receiver = getattr(ends[away], name), getattr(ends[here], name)
    sender.send(0, np.asarray(good, dtype))
    assert receiver.recv(0).tolist() == good
    sender.send(1, np.asarray(bad, dtype))
    with pytest.raises(errors.NebulaError, match=f"sent {name} for step 1.*{words}"):
        receiver.recv(1)


def test_an_evaluation_that_is_not_finite_is_refused():
    agreed = configured(length_buckets="8,16", batch_size=2, micro_batches=1).agreed
    evaluation = channels.table(agreed, 3, 4)[-1]
    arrays = {
        name: np.zeros(spec.shape, spec.dtype) for name, spec in evaluation.spec.items()
    }
    logits = np.zeros(arrays["length_logits"].shape, np.float32)
    logits[:, 0] = -np.inf  # no sentence has no token
    arrays["length_logits"] = logits.view(np.int32)
    evaluation.check(arrays)
    for name, leaf in (("hidden", "f4"), ("length_logits", "i4")):
        bad = np.full(arrays[name].shape, np.nan, np.float32).view(leaf)
        with pytest.raises(ValueError, match="nan is not finite"):
            evaluation.check(arrays | {name: bad})


def test_a_peer_sends_what_its_run_is_made_of():
    """Each side's checkpoint keeps it: see test_saved.py."""
    peer = frames.Hello("target", "1", {}, (), {"fingerprints": {"target_text": "abc"}})
    assert sides.peer_fingerprints(peer) == {"the peer's target_text": "abc"}
    for found in (None, "abc", {str(n): "" for n in range(9)}):
        details = {} if found is None else {"fingerprints": found}
        with pytest.raises(errors.NebulaError, match="target sent no fingerprints of"):
            sides.peer_fingerprints(frames.Hello("target", "1", {}, (), details))


def test_an_empty_key_is_no_key(tmp_path):
    run = configured(id_key=tmp_path / "key")
    (tmp_path / "key").write_bytes(b"")
    with pytest.raises(errors.NebulaError, match="the file is empty"):
        data.id_key(run)
    (tmp_path / "key").write_bytes(b"secret")
    assert data.id_key(run) == b"secret"


def test_what_a_side_sends_of_its_model_is_keyed(tmp_path):
    """Else the other side could tell whether a text that it guesses is the same."""
    manifest = tmp_path / "run" / "target" / "model" / target_model.MADE_OF
    manifest.parent.mkdir(parents=True)
    manifest.write_text("['model', 'text']\n")
    sent = set()
    for key in (b"one", b"other"):
        (tmp_path / "key").write_bytes(key)
        run = configured(id_key=tmp_path / "key", workdir=tmp_path / "run")
        sent.add(target_model.fingerprint(run))
    assert len(sent) == 2
    assert files.digest_of([manifest.read_text()]) not in sent


@pytest.mark.parametrize(
    "changes",
    [
        *({"width": 0}, {"width": "24"}, {"layers": True}, {"more": 1}),
        *({"width": 10**13}, {"width": 10**25}, {"heads": 3}, {"dtype": 7}),
        {"layer_norm_epsilon": None},
    ],
)
def test_a_peer_whose_model_cannot_be_is_refused(changes):
    model = transformer.Config(60, 2, 16, 2, 32, 16)
    details = {"model": dataclasses.asdict(model)}
    sent = frames.Hello("target", "1", {}, (), details)
    assert sides.peer_model(sent) == model
    sent.details["model"] |= changes
    with pytest.raises(errors.NebulaError, match="target"):
        sides.peer_model(sent)
