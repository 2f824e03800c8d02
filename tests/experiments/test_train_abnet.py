"""ABNet from end to end: real processes, sockets, files; tiny models, invented text."""

import concurrent.futures
import contextlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import ports
import pytest
import tiny_runs
import tiny_translations
import trees
from absl import flags
from absl.testing import flagsaver
from flax import traverse_util

from experiments import configuration
from experiments import translate as translate_command
from experiments.abnet import config, translator, two_sites
from nebula_jax import errors
from nebula_jax.communication.wire import frames, session
from nebula_jax.data import parallel_side
from nebula_jax.evaluation import bleu, sentence_scores
from nebula_jax.runtime.life import process
from nebula_jax.training import metrics

STEPS = 5
HELD_OUT = 4  # more than --bleu_sentences
RUN = {"steps": STEPS, "checkpoint_every": STEPS, "held_out_pairs": HELD_OUT}
# Models of one layer, which are soon compiled.
SHALLOW = {
    "source_model": "models/shallow_spanish",
    "target_model": "models/shallow_english",
}
# All sentences in one shape, which is soon compiled.
ALIKE = tiny_translations.ALIKE | {"tls": "off"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that share text and models; each test names its own workdir."""
    folder = tmp_path_factory.mktemp("translations")
    return tiny_translations.Translations(folder)


@pytest.fixture(scope="module")
def split(runs):
    """A run over two clusters, encrypted: its folder and what it said."""
    output = runs.finished(workdir="split", **RUN | SHALLOW)
    return runs.folder / "split", output


@pytest.fixture(scope="module")
def whole(runs):
    """The same run in one process: its folder."""
    runs.finished(workdir="whole", cluster="whole", **RUN | SHALLOW)
    return runs.folder / "whole"


def assert_equal_params(got, want):
    """Parameters within 1e-5, except biases of keys: a softmax does not change with
    them, so their gradients are rounding errors, of which Adam makes steps."""
    for side, whole in zip(got, want, strict=True):
        ours, theirs = side["state"]["params"], whole["state"]["params"]
        for params in (ours, theirs):
            for adapter in params.values():
                if isinstance(adapter, dict) and "key" in adapter:
                    del adapter["key"]["bias"]
        trees.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_split_run_equals_the_whole(runs, split, whole):
    """Parameters are equal within 1e-5 after 5 steps."""
    assert_equal_params(runs.sides("split", STEPS), runs.sides("whole", STEPS))
    scores = [
        metrics.read(folder)[-1]["held_out_bleu"]
        for folder in (split[0] / "target", whole / "whole")
    ]
    assert scores[0].keys() == {"dev", "test", "held_out"}
    assert scores[0] == scores[1]
    # What a perfect translation would have: some words are in no text to train on.
    ceilings = [
        metrics.read(folder)[-1]["held_out_ceiling"]
        for folder in (split[0] / "target", whole / "whole")
    ]
    assert ceilings[0] == ceilings[1]
    assert ceilings[0]["dev"] == pytest.approx(100)
    assert 50 < ceilings[0]["held_out"] < 99
    assert "BLEU of the references themselves" in split[1]


def scores_of(workdir):
    """The scores of held-out sentences, and what the summary has of them."""
    name = f"target/translations/held_out-{STEPS:08d}.scores.tsv"
    summary = json.loads((workdir / "summary.json").read_text())
    text = (workdir / name).read_text()
    return sentence_scores.loads(text), summary["held_out"]


def test_held_out_losses_over_two_clusters_are_those_of_the_whole(split, whole):
    ours, about = scores_of(split[0])
    theirs, _ = scores_of(whole)
    assert sentence_scores.are_paired(ours, theirs)
    np.testing.assert_allclose(ours.nats, theirs.nats, rtol=1e-4)
    np.testing.assert_array_equal(ours.counts, theirs.counts)
    assert len(ours.ids) == HELD_OUT
    assert {each.rpartition("-")[0] for each in ours.ids} == {"held_out"}
    loss = sentence_scores.loss(ours)
    assert 0 < loss.standard_error < loss.mean < 8
    assert about == {
        "step": STEPS,
        "loss": pytest.approx(loss.mean, rel=1e-5),
        "standard_error": pytest.approx(loss.standard_error, rel=1e-4),
        "tokens": ours.tokens.sum(),
        "sentences": HELD_OUT,
        "bleu": pytest.approx(bleu.of_statistics(ours.counts)),
    }
    assert f"4 held-out pairs after step 5: loss {loss.mean:.3f} ±" in split[1]


@pytest.mark.slow
def test_the_autoregressive_split_run_equals_the_whole_on_two_devices_each(runs):
    flags = RUN | tiny_translations.ALIKE | {"target_model": "models/english"}
    for cluster, devices in (("all", 2), ("whole", 1)):
        output = runs.finished(
            workdir=f"ar-{cluster}",
            cluster=cluster,
            devices_per_cluster=devices,
            timeout=300,
            **flags,
        )
        assert "training an MLM head on the target text" in output
        # As nobody had trained it for longer than that, it goes on training.
        target = runs.sides(f"ar-{cluster}", STEPS)[1]
        assert "mlm_head" in target["state"]["params"]
    assert_equal_params(runs.sides("ar-all", STEPS), runs.sides("ar-whole", STEPS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        # Others: abnet/test_resume.py.
        ("int8(8)", "pack_tokens|int8(8)"),
        ("pack_tokens|svd(0.6)|fp16", "zstd"),
    ],
)
def test_codecs_do_in_one_process_what_they_do_over_the_line(runs, forward, backward):
    flags = SHALLOW | {"steps": 17, "checkpoint_every": 17, "length_buckets": "8,16"}
    flags |= {"forward_codec": forward, "backward_codec": backward}
    name = forward.partition("(")[0].replace("|", "-")
    for cluster in ("all", "whole"):
        runs.finished(
            workdir=f"{name}-{cluster}", cluster=cluster, timeout=300, **flags
        )
    trees.assert_same(runs.sides(f"{name}-all", 17), runs.sides(f"{name}-whole", 17))


def test_a_run_leaves_all_that_was_promised(split):
    folder, output = split
    summary = json.loads((folder / "summary.json").read_text())
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "run.flags").is_file()
    assert not (folder / "tls").exists()  # keys do not outlive the run
    assert [each["cluster"] for each in summary["clusters"]] == ["target", "source"]
    assert summary["bleu"][-1].keys() == {"step", "dev", "test", "held_out"}
    assert len(summary["examples"]) == 3
    translations = folder / "target" / "translations" / f"test-{STEPS:08d}.txt"
    assert summary["examples"] == translations.read_text().splitlines()
    words = ("step", "loss", "tokens/s", "sent", "waited", "nrefs:1|case:lc")
    for word in (*words, "Bytes a step"):
        assert word in output


def names_in(tree):
    return {part for path in traverse_util.flatten_dict(tree) for part in path}


def test_the_optimizer_knows_nothing_of_what_is_frozen(runs, split):
    """Adapters and the table of lengths; this target came with a head of its own."""
    for side, others in zip(
        runs.sides("split", STEPS), ({"length_table"}, set()), strict=True
    ):
        state = side["state"]
        assert state["params"].keys() == {"adapters_0"} | others
        trained = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
        moments = [leaf.size for leaf in jax.tree.leaves(state["opt_state"])]
        counters = [size for size in moments if size == 1]
        assert sum(moments) - len(counters) == 2 * trained
        assert not names_in(state) & {"encoder", "embeddings", "mlm_head"}


def test_nothing_crosses_but_hidden_states_gradients_and_lengths(split):
    """Every frame is counted; the only label that goes back is the target's length."""
    folder, _ = split
    ledgers = [
        json.loads((folder / name / "summary.json").read_text())["ledger"]
        for name in ("source", "target")
    ]
    for ours, theirs in (ledgers, ledgers[::-1]):
        assert {kind for kind in ours if not is_tensor(kind)} <= {
            f"{way} {kind}"
            for way in ("sent", "received")
            for kind in ("Open", "Hello", "Welcome", "StepDone", "Ping", "End")
        }
        for kind, counted in ours.items():
            if kind.startswith("sent") and is_tensor(kind):
                assert theirs[kind.replace("sent", "received")] == counted
    (sent, back) = (
        {
            kind.removeprefix(way): count
            for kind, count in ledgers[0].items()
            if kind.startswith(way) and is_tensor(kind)
        }
        for way in ("sent ", "received ")
    )
    # Buckets of the source's rows; two buckets of hidden states; dev, test, held out.
    assert sent.keys() == {"buckets", "hidden[8]", "hidden[16]", "evaluation"}
    assert sent["buckets"][0] == 1
    # Two tensors a step, and its end.
    assert sent["hidden[8]"][0] + sent["hidden[16]"][0] == 3 * STEPS
    assert sent["evaluation"][0] == 3
    # Lengths, once; two buckets of gradients.
    assert back.keys() == {"lengths", "gradient[8]", "gradient[16]"}
    head = frames.head_bytes() + frames.LAYOUTS[frames.Tensor].size
    bits = 5  # of a length up to 16
    examples = tiny_translations.PAIRS["train"] - HELD_OUT
    lengths = head + int(np.ceil(examples * bits / 8))
    assert back["lengths"] == [1, lengths]
    frame = head + 4 * 8 * 16 * 4 + 4 * 8 + 4 * 4  # hidden, mask, numbers of a bucket 8
    count, size = back["gradient[8]"]
    assert size == count * frame
    count, size = sent["hidden[8]"]
    assert size == count // 3 * (2 * frame + head + frames.IDENTITY_BYTES)


@pytest.mark.slow
def test_one_process_skips_of_each_side_what_the_clusters_skip(runs):
    """A loss that is NaN changes the parameters of neither side. It comes of an absurd
    learning rate: with the parameters at the end nothing can be evaluated."""
    settings = ALIKE | {
        **{"steps": 8, "checkpoint_every": 4, "eval_every": 8},
        **{"micro_batches": 2, "max_in_flight": 4},
        **{"forward_codec": "fp16", "backward_codec": "fp16", "log_every": 1},
        **{"learning_rate": 1e16, "warmup_steps": 6, "allow_nonfinite": 100},
    }
    for cluster in ("whole", "all"):
        given = {"workdir": f"skipping-{cluster}", "cluster": cluster}
        status, output = runs.run(**given, **settings)
        assert "the loss of step 3 is nan: skipped" in output
        assert "that cannot be: inf is not finite" in output
        assert status == 1
    sides = [runs.sides(f"skipping-{cluster}", 4) for cluster in ("whole", "all")]
    for one, other in zip(*sides, strict=True):
        trees.assert_same(one["state"], other["state"])


def is_tensor(kind):
    """Of a ledger's keys: other messages than tensors have names in capitals."""
    return kind.split()[1][0].islower()


@pytest.mark.slow
def test_with_ar_no_label_goes_back_and_with_pack_tokens_no_padding_crosses(runs):
    codecs = {"forward_codec": "pack_tokens|fp16", "backward_codec": "pack_tokens"}
    output = runs.finished(workdir="packed", steps=3, **ALIKE | codecs)
    folder = runs.folder / "packed/source"
    # A process that has no loss shows none.
    lines = output.splitlines()
    assert not any("loss" in each for each in metrics.read(folder))
    assert not any(line.startswith("source ") and "loss" in line for line in lines)
    ledger = json.loads((folder / "summary.json").read_text())["ledger"]
    received = [kind for kind in ledger if kind.startswith("received")]
    assert [*filter(is_tensor, received)] == ["received gradient[8]"]
    tokens = 4 * 7  # a micro-batch of sentences of seven tokens, in rows of eight
    rest = 4 * 8 // 8 + 4 * 4  # which places are real, a bit each; the numbers
    head = frames.head_bytes() + frames.LAYOUTS[frames.Tensor].size
    ends = 3 * (head + frames.IDENTITY_BYTES)
    size = 6 * (head + tokens * 16 * 2 + rest) + ends
    assert ledger["sent hidden[8]"] == [9, size]
    assert ledger["received gradient[8]"] == [6, 6 * (head + tokens * 16 * 4 + rest)]


def test_the_target_knows_the_words_of_its_own_language_alone(runs, split):
    """What each side reads: tests/data/test_split_parallel.py."""
    made = json.loads((split[0] / "target" / "model" / "config.json").read_text())
    side = next((runs.folder / "prepared" / "sides").iterdir())
    train = parallel_side.read(side / "target" / "train.tsv.gz")
    # English pieces of the training text, and five that are no text.
    words = {word for sentence in train.texts for word in sentence.split()}
    assert made["vocab_size"] == len(words) + 5


LINES = ["la casa tiene 3 puertas", "", "la torre tiene 4 puertas"]


@pytest.fixture(scope="module")
def notebook(runs, split):
    """What a notebook makes of LINES, without flags: those of its process stay."""
    with contextlib.chdir(runs.folder):
        before = flags.FLAGS.is_parsed()
        found = translator.Translator("split").translate(LINES)
        assert flags.FLAGS.is_parsed() == before
    return found


def test_a_notebook_translates_as_the_command(
    runs, split, monkeypatch, translated_here, notebook
):
    _, out, _ = translated_here("\n".join(LINES), "--run=split")
    assert "".join(f"{line}\n" for line in notebook) == out
    # As it is at one of two labs.
    for name in ("source", "target"):
        shutil.copytree(runs.folder / "split" / name, runs.folder / "joined" / name)
        if name == "source":
            with pytest.raises(errors.NebulaError, match=r"source has 5; target has n"):
                translator.Translator("joined")
    assert translator.Translator("joined").step == STEPS


@pytest.mark.slow  # of M3 it is in every run of the tests
def test_eval_only_finds_the_runs_own_bleu_on_its_own_text(runs, split):
    output = runs.finished("--eval_only", run="split", **SHALLOW)
    (path,) = (split[0] / "evaluated").glob("es-en-*/summary.json")
    found = json.loads(path.read_text())
    own = metrics.read(split[0] / "target")[-1]["held_out_bleu"]
    assert found["step"] == STEPS
    assert {name: each["bleu"] for name, each in found["tests"].items()} == {
        name: pytest.approx(own[name], abs=1e-6) for name in ("dev", "test")
    }
    lines = split[0] / "target" / "translations" / f"test-{STEPS:08d}.txt"
    assert (path.parent / "test.txt").read_text() == lines.read_text()
    assert "| test | " in output


@pytest.mark.slow
def test_a_run_begins_with_the_parameters_of_another(runs, split):
    given = {"init_from": "split", "workdir": "next", "cluster": "whole"}
    output = runs.finished(steps=1, checkpoint_every=1, seed=9, **given | SHALLOW)
    assert f"beginning with target of split, step {STEPS}" in output
    for one, other in zip(
        runs.sides("next", 1), runs.sides("split", STEPS), strict=True
    ):
        ours, theirs = one["state"]["params"], other["state"]["params"]
        # The first rate is 1e-7.
        trees.assert_close(ours, theirs, rtol=0, atol=1e-6)


class Terminal(io.TextIOWrapper):
    """Standard input that a person types."""

    def isatty(self):
        return True


@pytest.fixture
def translated_here(runs, monkeypatch, capsys):
    """Runs the command in this process."""

    def translated(text, *arguments, stream=io.TextIOWrapper):
        text = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr("sys.stdin", stream(io.BytesIO(text)))
        monkeypatch.setattr("sys.argv", ["translate", *arguments])
        monkeypatch.chdir(runs.folder)
        with flagsaver.flagsaver():
            flags.FLAGS(["translate", *arguments])
            status = process.guarded(translate_command.main)
        return status, *capsys.readouterr()

    return translated


def test_a_run_translates_line_by_line(split, translated_here):
    """An empty line stays one; other separators than a line's end do not cut it."""
    text = f"la casa\n\ntres\u2028cuatro\n{'puertas ' * 30}\n家 🏠\n"
    status, out, err = translated_here(text, "--run=split")
    assert status == 0, err
    lines = out.split("\n")
    assert len(lines) == 6
    assert lines[1] == lines[5] == ""
    assert "1 of 5 sentences were cut: line-4" in err
    assert "line-3, line-5\n" in err  # which have no character that is known


@pytest.fixture
def target_site(runs, split, monkeypatch):
    """Serves the target's side of the run: how it is reached, and how it ends."""
    monkeypatch.chdir(runs.folder)
    listen = f"127.0.0.1:{ports.free_port()}"
    run = config.from_flags(configuration.flags_of_run("split", "train_abnet"))
    place = {"cluster": "target", "listen": listen, "tls": "off"}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        end = pool.submit(two_sites.serve, run.with_local(**place))
        yield ["--run=split", "--cluster=source", "--tls=off", f"--peer={listen}"], end


def test_two_sites_translate_as_one_place_does(
    translated_here, target_site, notebook, monkeypatch
):
    """What crosses is hidden states and words; of an empty line there are none."""
    monkeypatch.setattr(translate_command, "PART", 2)  # of three lines
    flags, end = target_site
    status, out, err = translated_here("\n".join(LINES), *flags)
    assert (status, out.splitlines()) == (0, notebook), err
    assert notebook[0]
    assert end.result(timeout=30) is None
    assert "translating for source" in err


def test_a_pipe_is_translated_as_it_comes_and_a_stop_ends_both_sites(runs, target_site):
    flags, end = target_site
    with subprocess.Popen(
        [sys.executable, "-m", "experiments.translate", *flags],
        cwd=runs.folder,
        env=runs.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as source:
        os.write(source.stdin.fileno(), b"la casa tiene 3 puertas\n")
        assert select.select([source.stdout], [], [], tiny_runs.SECONDS)[0]
        source.terminate()
        with pytest.raises(session.PeerAborted, match="source gave up: it was stopped"):
            end.result(timeout=10)
        assert source.wait(timeout=10) == 128 + signal.SIGTERM


def test_a_site_says_that_the_other_one_is_gone_and_why(translated_here, target_site):
    """As where a person types what is no text, or a process is ended."""
    flags, end = target_site
    status, out, err = translated_here(b"se\xf1or\n", *flags, stream=Terminal)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == (
        "error: standard input:1: not UTF-8 (invalid continuation byte)"
    )
    with pytest.raises(session.PeerAborted, match="standard input:1: not UTF-8"):
        end.result(timeout=30)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fingerprints": {"source_model": "another"}}, "source has a side of another"),
        ({"steps": [STEPS + 1]}, "no step is saved at both sites"),
        ({"flag": "--beams=1"}, "target has --beams=2, source has --beams=1"),
    ],
)
def test_sides_that_do_not_belong_together_are_refused(
    translated_here, target_site, monkeypatch, change, words
):
    flags, end = target_site
    hello = configuration.Run.hello

    def changed(self, settings, saved, **details):
        if self.local.cluster == "source":
            details |= {name: change[name] for name in change.keys() & details.keys()}
            saved = change.get("steps", saved)
        return hello(self, settings, saved, **details)

    monkeypatch.setattr(configuration.Run, "hello", changed)
    given = [change["flag"]] if "flag" in change else []
    status, out, err = translated_here("uno\n", *flags, *given)
    with pytest.raises(errors.NebulaError) as ended:
        end.result(timeout=30)
    assert status in (1, 4)
    assert not out
    assert words in f"{err}{ended.value}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster=whole"], "--cluster=whole: expected all, source or target"),
        (["--cluster=source", "--tls=off"], "cluster=source needs peer=HOST:PORT"),
        (["--cluster=target"], "cluster=target needs listen=HOST:PORT"),
        (
            ["--cluster=target", "--listen=127.0.0.1:1", "--tls=auto"],
            "cluster=target needs tls=FOLDER with its certificate",
        ),
    ],
)
def test_a_site_that_cannot_be_reached_says_what_it_lacks(
    translated_here, split, arguments, words
):
    status, _, err = translated_here("uno\n", "--run=split", *arguments)
    assert status == 2
    assert words in err


@pytest.mark.parametrize("words", ["[]", '["a"]', '["a", 2]', '["a", "\\ud800"]', "{"])
def test_words_that_cannot_be_are_no_translation(words):
    page = np.frombuffer(words.encode().ljust(40, b"\0"), np.uint8)
    with pytest.raises(session.RemoteProtocolError, match="no lines of text"):
        two_sites._words(page, rows=2)


def test_a_translation_is_one_line_that_a_terminal_can_show(
    runs, split, monkeypatch, translated_here
):
    bad = "uno\n\x1b[2Jdos"
    monkeypatch.setattr(translator.Target, "words", lambda self, hidden: [bad, bad])
    status, out, _ = translated_here("la casa\nla torre\n", "--run=split")
    assert (status, out) == (0, "uno  [2Jdos\n" * 2)


def as_it_was(self, numbered, rows):
    """In the place of a translator's work, which comes to its end at `no more`."""
    lines = [line for _, line in numbered]
    if "no more" in lines:
        raise errors.NebulaError("no more")
    return lines


def test_what_is_translated_of_a_file_is_written(translated_here, split, monkeypatch):
    monkeypatch.setattr(translator.Translator, "part", as_it_was)
    monkeypatch.setattr(translate_command, "PART", 2)
    status, out, _ = translated_here("uno\ndos\nno more\n", "--run=split")
    assert (status, out) == (1, "uno\ndos\n")


def test_a_line_in_another_encoding_is_named(translated_here, split):
    status, out, err = translated_here(
        "uno\nse\xf1or\n".encode("latin-1"), "--run=split"
    )
    assert (status, out) == (1, "")
    assert err.startswith("error: standard input:2: not UTF-8")
    assert translated_here("", "--run=split") == (0, "", "")


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_marks_of_other_systems_are_no_text(translated_here, split, monkeypatch, end):
    """And a person hears who has put the spaces into another language than English."""
    monkeypatch.setattr(translator.Translator, "part", as_it_was)
    monkeypatch.setattr(
        translate_command.config, "languages", lambda pair: ("es", "fr")
    )
    text = f"\ufeffuno{end}dos{end}"
    status, out, err = translated_here(text, "--run=split")
    assert (status, out) == (0, "uno\ndos\n")
    assert "where English has them, which is wrong at some marks of fr" in err


@pytest.mark.parametrize("arguments", [(), ("--run=text",)])
def test_what_is_no_run_of_train_abnet_translates_nothing(translated_here, arguments):
    status, out, err = translated_here("uno\n", *arguments)
    assert status == 2
    assert not out
    assert err.startswith("error: ")
    assert "run of train_abnet" in err
