import four_bit_file
import numpy as np
import pytest

from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import q4_file


def test_a_block_is_decoded_as_its_description_says():
    """Low nibbles first, then the high ones; (nibble - 8) * scale."""
    block = np.float16(0.5).tobytes() + bytes([0x80 | 0x0F] + [0x88] * 14 + [0xF0])
    values = q4_file.decode_blocks(block)
    assert values.shape == (32,)
    assert values[0] == (15 - 8) * 0.5
    assert values[15] == (0 - 8) * 0.5
    assert values[16] == 0
    assert values[31] == (15 - 8) * 0.5
    assert not values[1:15].any()


def test_a_file_is_read_under_berts_names(tmp_path):
    data, tensors = four_bit_file.make()
    (tmp_path / "model.bin").write_bytes(data)
    found = q4_file.read(tmp_path / "model.bin")
    assert found.pieces == four_bit_file.PIECES
    for ours, theirs in (
        ("embeddings.word_embeddings.weight", "emb.word"),
        ("embeddings.position_embeddings.weight", "emb.pos"),
        ("embeddings.LayerNorm.bias", "emb.ln.b"),
        ("encoder.layer.0.attention.self.key.weight", "l0.k.w"),
        ("encoder.layer.0.attention.output.LayerNorm.weight", "l0.aln.w"),
        ("encoder.layer.0.intermediate.dense.weight", "l0.fi.w"),
        ("encoder.layer.0.output.dense.bias", "l0.fo.b"),
    ):
        np.testing.assert_array_equal(found.tensors[ours], tensors[theirs])
        assert found.tensors[ours].dtype == np.float32
    assert len(found.tensors) == len(tensors)
    assert found.config["layer_norm_eps"] == 1e-12
    assert found.config["vocab_size"] == four_bit_file.ROWS
    assert found.config["pad_token_id"] == 1


@pytest.mark.parametrize("kept", [4, 50, 100, 600, -1])
def test_a_file_cut_short_is_named(kept, tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(four_bit_file.make()[0][:kept])
    with pytest.raises(checkpoint_folder.PretrainedError, match="no whole E5S1 file"):
        q4_file.read(path)


def test_another_file_is_named(tmp_path):
    path = tmp_path / "model.bin"
    with pytest.raises(checkpoint_folder.PretrainedError, match="No such file"):
        q4_file.read(path)
    path.write_bytes(b"GGUF")
    with pytest.raises(checkpoint_folder.PretrainedError, match="begin with E5S1"):
        q4_file.read(path)
