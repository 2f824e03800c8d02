import numpy as np
import pytest
import tiny_translations

from experiments.abnet import data as abnet_data
from experiments.abnet import target_model
from nebula_jax.data import tokenizers
from scripts import leakage
from scripts.leaks import attacked_model, attacks

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
    return attacked_model.assemble(run, folders)


def rows(*names):
    found = leakage.chosen()
    return [row for row in found if row.name in names]


@pytest.fixture(scope="module")
def found(attacked):
    codecs = rows("baseline", "FP16(SVD(0.6))+INT8", "no padding")
    table5 = {
        "rows": [
            {"name": "baseline", "forward": "identity", "bleu": [28.0, 29.0]},
            {"name": "no padding", "forward": "another codec", "bleu": [1.0]},
        ]
    }
    return leakage.gather(attacked, codecs, table5, [0, 1], 12, 3)


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
    assert [each["first"] for each in plain[0]["nearest"]] == [1.0, 1.0]
    # 4 of 8 ranks of [8, 16], as float16: 4 x 24 x 2 bytes of 512, and the mask.
    spare = 4 * 8 * 16 * 4
    assert svd[0]["ratio"] == pytest.approx((4 * 4 * 24 * 2 + 4 * 8 + 4 * 4) / spare)
    assert plain[0]["ratio"] == pytest.approx(1 + (4 * 8 + 4 * 4) / spare)
    assert packed[0]["ratio"] < 1
    bleu = {row["codec"]: row["bleu"] for row in found["rows"]}
    assert bleu["identity"] == [28.0, 29.0]
    assert bleu["pack_tokens"] == []  # the record has another codec of that name


def test_attackers_do_not_have_the_sentences_that_they_attack():
    ids = np.asarray([[2, n % 7 + 5, 3, 0] for n in range(40)], np.int32)
    text = attacked_model.rows_of(ids, SPECIAL)
    for seed in (0, 1):
        attacked, own = attacked_model.sides(text, seed, 3)
        assert len(attacked) == 3
        assert len(own)
        assert not set(ids[attacked][:, 1]) & set(ids[own][:, 1])
    assert not np.array_equal(
        attacked_model.sides(text, 0, 3)[0], attacked_model.sides(text, 1, 3)[0]
    )


def test_rows_number_text_alone():
    ids = np.asarray([[2, 9, 7, 3], [2, 9, 3, 0]], np.int32)
    text = attacked_model.rows_of(ids, SPECIAL)
    assert text.kept.tolist() == [0, 2, 3, 7, 9]
    np.testing.assert_array_equal(text.kept[text.ids], ids)
    assert text.pieces.tolist() == [[-1, 1, 0, -1], [-1, 1, -1, -1]]
    assert text.kept[text.candidates].tolist() == [7, 9]
    assert text.mask.sum() == 7


def test_what_is_attacked_is_what_the_receiver_decodes():
    random = np.random.RandomState(0)
    values = random.randn(10, 6, 16).astype(np.float32)
    mask = np.arange(6)[None] < random.randint(2, 7, (10, 1))
    plain = attacks.line("identity", 4, 6, 16)(values, mask)
    np.testing.assert_array_equal(plain.arrays, values)
    send = attacks.line("pack_tokens|fp16", 4, 6, 16)
    for scale in (1.0, 2.0):  # nothing of an earlier tensor stays
        packed = send(scale * values, mask)
        assert not packed.arrays[~mask].any()
        want = scale * values[mask]
        np.testing.assert_allclose(packed.arrays[mask], want, atol=4e-3)
    assert packed.ratio < 0.5 < plain.ratio
