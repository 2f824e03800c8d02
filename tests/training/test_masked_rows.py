import functools

import jax
import numpy as np

from nebula_jax.data import joined_rows
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import activations
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import masked_rows, masking

V, B, L, RATE = 97, 16, 32, 0.15
SPECIAL = vocabularies.SPECIAL


def text(longest=20, shortest=1):
    """Rows of very unequal length, one of them [PAD] throughout."""
    random = np.random.RandomState(0)
    ids = random.randint(vocabularies.NUM_SPECIAL, V, (B, L)).astype(np.int32)
    for row in range(B):
        ids[row, random.randint(shortest, longest + 1) :] = SPECIAL.pad
    ids[3] = SPECIAL.pad
    return ids


@functools.partial(jax.jit, static_argnames="groups")
def masked(ids, first_row=0, where=None, groups=1):
    def mask(ids, where):
        return masked_rows.mask(
            jax.random.key(7),
            ids,
            first_row,
            where,
            rate=RATE,
            policy=masking.BERT,
            vocab_size=V,
        )

    mesh = mesh_lib.make_mesh(jax.devices()[:groups])
    return activations.on(mesh, mask)(ids, where)


def plan(ids, rows, groups=1):
    return joined_rows.plan(
        joined_rows.lengths(ids, SPECIAL.pad), L, rows=rows, groups=groups
    )


def test_two_halves_are_masked_as_the_whole():
    ids = text()
    whole = masked(ids)
    halves = masked(ids[: B // 2]), masked(ids[B // 2 :], B // 2)
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *halves)
    jax.tree.map(np.testing.assert_array_equal, joined, whole)
    other = masked(ids[B // 2 :], 0)
    assert (other.input_ids != halves[1].input_ids).any()


def by_number(rows):
    """The masked tokens of each sequence: (sequence, position) -> (written, original).

    Of joined rows or of a sequence a row, read one by one.
    """
    found = {}
    for row, slot in np.argwhere(rows.masked < L):
        place = rows.masked[row, slot]
        at = row * L + place if rows.where is None else rows.where[row, place]
        assert divmod(at, L) not in found
        found[divmod(at, L)] = rows.input_ids[row, place], rows.originals[row, slot]
    return found


def test_a_token_is_masked_alike_joined_or_not():
    ids = text()
    found = plan(ids, rows=10)
    assert found.left_out == 0
    apart, joined = jax.device_get((masked(ids), masked(ids, where=found.where)))
    assert joined.input_ids.shape == (10, L)
    assert by_number(joined) == by_number(apart)
    assert joined.weight() == apart.weight() == len(by_number(apart)) > B
    assert np.sum(joined.is_text) == np.sum(apart.is_text) == np.sum(ids != SPECIAL.pad)
    # What is not masked is where the plan puts it.
    text_of = np.where(
        found.where < 0, SPECIAL.pad, apart.input_ids.reshape(-1)[found.where]
    )
    np.testing.assert_array_equal(joined.input_ids, text_of)


def test_groups_of_devices_have_plans_of_their_own():
    ids = text()
    found = plan(ids, rows=12, groups=4)
    assert found.left_out == 0
    assert found.where.max() < B // 4 * L
    together = jax.device_get(masked(ids, where=found.where, groups=4))
    apart = by_number(jax.device_get(masked(ids)))
    firsts = np.repeat(np.arange(4) * (B // 4), 3)[:, None] * L
    where = np.where(found.where < 0, -1, found.where + firsts)
    assert by_number(together._replace(where=where)) == apart


def test_rows_of_the_shortest_sequences_have_slots_enough():
    """Each has a masked token, however short."""
    ids = text(longest=3, shortest=1)
    found = plan(ids, rows=B)
    joined, apart = jax.device_get((masked(ids, where=found.where), masked(ids)))
    assert by_number(joined) == by_number(apart)
    most = np.sum(joined.masked < L, axis=-1).max()
    assert most == joined_rows.MOST <= joined.masked.shape[-1]


def test_as_many_slots_as_a_row_could_need():
    """The longest sequences that share a row: every count rounded up."""
    for length in range(8, 200):
        slots = masked_rows.slots(RATE, length, is_joined=True)
        for count in range(1, joined_rows.MOST + 1):
            own = length // count
            each = min(max(1, round(RATE * own)), masking.capacity(RATE, length))
            assert count * each <= slots
    assert masked_rows.slots(RATE, 128, is_joined=False) == masking.capacity(RATE, 128)


def test_attention_and_positions_stay_within_a_sequence():
    ids = text()
    found = plan(ids, rows=10)
    mask, positions = jax.device_get(masked(ids, where=found.where).attention())
    for row, where in enumerate(found.where):
        for query, at in enumerate(where):
            same = where // L == at // L if at >= 0 else where < 0
            np.testing.assert_array_equal(mask[row, query], same)
            if at >= 0:
                assert positions[row, query] == at % L
    plain, none = masked(ids).attention()
    np.testing.assert_array_equal(plain, ids != SPECIAL.pad)
    assert none is None
