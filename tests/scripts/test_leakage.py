import types
from unittest import mock

import jax
import numpy as np
import pytest
import tiny_tables
import tiny_translations

from experiments.abnet import data as abnet_data
from experiments.abnet import target_model, whole
from nebula_jax.data import tokenizers
from nebula_jax.runtime.records import report
from nebula_jax.training import partition
from scripts import leakage
from scripts.tables import runs as table_runs

SPECIAL = tokenizers.SpecialTokens(0, 1, 2, 3, 4, size=30)

trained = pytest.mark.slow  # models; the attacks: tests/evaluation/test_leakage.py


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """A tiny run at step 0, whose two sides this process holds."""
    folder = tmp_path_factory.mktemp("leakage")
    flags = tiny_translations.Translations(folder).flags() | {
        "data_dir": folder / "alike",
        "prepared_dir": folder / "prepared",
        "pretrained_dir": folder / "pretrained",
        "workdir": folder / "run",
        "source_model": folder / "models" / "spanish",
        "target_model": folder / "models" / "shallow_english",
        "objective": "ar",
        "length_buckets": "8",
        "cluster": "whole",
        "plm_dropout": 0.0,
        "adapter_dropout": 0.0,
    }
    run = tiny_translations.run(**flags)
    folders = abnet_data.split(run)
    target_model.prepare(run, folders[1])
    both = whole.load(run, folders)
    half = both.halves[0]
    return both, partition.merge(half.fresh.init().params, half.frozen)


@pytest.fixture(scope="module")
def found(attacked):
    table5 = {"rows": [{"forward": "identity", "bleu": [28.0, 29.0]}]}
    with mock.patch.object(
        leakage, "CODECS", ("identity", "pack_tokens", "svd(0.6)|fp16")
    ):
        return leakage.gather(*attacked, table5, [0, 1], 12, 3)


@trained
def test_codecs_that_lose_nothing_leak_alike_and_others_are_their_own(found):
    """Without a layer every token is recovered: only the depth differs from there."""
    depths = {row["codec"]: row["depths"] for row in found["rows"]}
    plain, packed, svd = (
        depths[name] for name in ("identity", "pack_tokens", "svd(0.6)|fp16")
    )
    assert [each["depth"] for each in plain] == [0, 1, 2]  # thirds of two layers
    for one, other in zip(plain, packed, strict=True):
        assert one["nearest"] == other["nearest"]
        assert one["inversion"] == other["inversion"]
    assert plain[0]["nearest"] == (1.0, 1.0)
    # 4 of 8 ranks of [8, 16], as float16: 4 x 24 x 2 bytes of 512, and the mask.
    spare = 4 * 8 * 16 * 4
    assert svd[0]["ratio"] == pytest.approx((4 * 4 * 24 * 2 + 4 * 8 + 4 * 4) / spare)
    assert plain[0]["ratio"] == pytest.approx(1 + (4 * 8 + 4 * 4) / spare)
    assert packed[0]["ratio"] < 1
    bleu = {row["codec"]: row["bleu"] for row in found["rows"]}
    assert bleu["identity"] == [28.0, 29.0]
    assert bleu["pack_tokens"] == []
    about = report.provenance(1.0, seeds=("0", "1"))
    assert leakage.markdown(about | found).count("\n| ") == 4


def test_attackers_do_not_have_the_sentences_that_they_attack():
    ids = np.asarray([[2, n % 7 + 5, 3, 0] for n in range(40)], np.int32)
    for seed in (0, 1):
        attacked, own = leakage.sides(ids, seed, 3)
        assert len(attacked) == 3
        assert len(own)
        assert not set(ids[attacked][:, 1]) & set(ids[own][:, 1])
    assert not np.array_equal(leakage.sides(ids, 0, 3)[0], leakage.sides(ids, 1, 3)[0])


def test_rows_number_text_alone():
    ids = np.asarray([[2, 9, 7, 3], [2, 9, 3, 0]], np.int32)
    text = leakage.text_of(ids, SPECIAL)
    assert text.pieces.tolist() == [[-1, 1, 0, -1], [-1, 1, -1, -1]]
    assert text.candidates.tolist() == [7, 9]
    assert text.mask.sum() == 7


def test_what_is_attacked_is_what_the_receiver_decodes():
    random = np.random.RandomState(0)
    values = random.randn(10, 6, 16).astype(np.float32)
    mask = np.arange(6)[None] < random.randint(2, 7, (10, 1))
    spec = {
        "hidden": jax.ShapeDtypeStruct((4, 6, 16), np.float32),
        "mask": jax.ShapeDtypeStruct((4, 6), np.bool_),
        "index": jax.ShapeDtypeStruct((4,), np.int32),
    }
    plain, whole_ratio = leakage.crossed("identity", spec, values, mask)
    np.testing.assert_array_equal(plain, values)
    packed, ratio = leakage.crossed("pack_tokens|fp16", spec, values, mask)
    assert not packed[~mask].any()
    np.testing.assert_allclose(packed[mask], values[mask], atol=4e-3)
    assert ratio < 0.5 < whole_ratio


def test_what_is_attacked_is_trained_once(tmp_path, monkeypatch):
    runs = []

    def start(run, workdir):
        runs.append(run.arguments)
        (workdir / "summary.json").write_text("{}")

    monkeypatch.setattr(table_runs, "start", start)
    flagfile = tmp_path / "tiny.flags"
    flagfile.write_text("--steps=3\n")
    table = tiny_tables.table(workdir=tmp_path / "leakage")
    first = leakage.train(table, flagfile)
    assert leakage.train(table, flagfile) == first
    assert len(runs) == 1
    assert {"--cluster=whole", "--data_dir=text"} <= set(runs[0])
    flagfile.write_text("--steps=4\n")
    assert leakage.train(table, flagfile) != first


def test_what_a_run_trained_is_attacked(monkeypatch, tmp_path):
    """The parameters of the source, without the step that they are of."""
    half = types.SimpleNamespace(frozen={"plm": 2.0, "adapter": None})
    both = types.SimpleNamespace(halves=[half])
    monkeypatch.setattr(leakage.configuration, "parse_run", lambda *run: None)
    monkeypatch.setattr(leakage.abnet_config, "from_flags", lambda: "run")
    monkeypatch.setattr(leakage.data, "split", lambda run: "folders")
    monkeypatch.setattr(leakage.whole, "load", lambda *about: both)
    states = 7, [{"plm": None, "adapter": 1.0}, {}]
    monkeypatch.setattr(leakage.translator, "trained_params", lambda workdir: states)
    assert leakage.load(tmp_path) == (both, {"plm": 2.0, "adapter": 1.0})
