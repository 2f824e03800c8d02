import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from scripts.ladder import programs

TEXT = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[2,3], bf16[4])) -> (s32[], f32[2,3], bf16[4]) {
  %p = (s32[], f32[2,3]{1,0}, bf16[4]{0}) parameter(0)
  %all-reduce.1 = (f32[2,3]{1,0}, /*index=1*/bf16[4]{0}) all-reduce(%x, %y), channel_id=1, to_apply=%add
  ROOT %tuple = (s32[], f32[2,3]{1,0}, bf16[4]{0}) tuple(%n, %u, %v)
}

%outer (p: (s32[], f32[2,3], bf16[4])) -> (s32[], f32[2,3], bf16[4]) {
  ROOT %while.2 = (s32[], f32[2,3]{1,0}, bf16[4]{0}) while(%p), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}

%other (p: f32[7]) -> f32[7] {
  %p = f32[7]{0} parameter(0)
  ROOT %unused = f32[7]{0} all-reduce(%p), channel_id=9, to_apply=%add
}

ENTRY %main (x: f32[2,3]) -> f32[] {
  %x = f32[2,3]{1,0} parameter(0)
  %while.1 = (s32[], f32[2,3]{1,0}, bf16[4]{0}) while(%t), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %all-reduce-start.3 = f32[8]{0} all-reduce-start(%z), channel_id=2, to_apply=%add
  %all-reduce-done.3 = f32[8]{0} all-reduce-done(%all-reduce-start.3)
  ROOT %psum.4 = f32[] all-reduce(%loss), channel_id=3, to_apply=%add, metadata={op_name="while(body)"}
}
"""  # noqa: E501


def test_a_loop_counts_as_often_as_it_runs():
    """15 times 6 float32 and 4 bfloat16 in loops of loops, 8 float32, and a loss."""
    found = programs.all_reduces(TEXT)
    assert found == (3 * 5 + 1, 1, 15 * (6 * 4 + 4 * 2) + 8 * 4 + 4)


def test_what_the_entry_does_not_run_does_not_count():
    text = TEXT.replace("body=%outer", "body=%add")
    assert programs.all_reduces(text) == (1, 1, 8 * 4 + 4)


def test_a_loop_of_unknown_length_is_refused():
    text = TEXT.replace('{"known_trip_count":{"n":"5"}}', "{}")
    with pytest.raises(ValueError, match="outer runs an unknown number of times"):
        programs.all_reduces(text)


def test_a_loop_of_unknown_length_without_a_sum_is_none_of_its_business():
    text = TEXT.replace('{"known_trip_count":{"n":"5"}}', "{}")
    text = text.replace("body=%body", "body=%add")
    assert programs.all_reduces(text).times == 1


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        programs.all_reduces("a text")


@pytest.mark.parametrize("times", [3, 6])
def test_sums_of_a_real_program_are_counted(times):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("data",))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def step(rows):
        def add(before, row):
            return before + jax.lax.psum(jnp.outer(row, row), "data"), ()

        squares, _ = jax.lax.scan(add, jnp.zeros((5, 5)), rows)
        return squares / jax.lax.psum(jnp.sum(rows), "data")

    rows = np.zeros((2 * times, 5), np.float32)
    text = jax.jit(step).lower(rows).compile().as_text()
    assert programs.all_reduces(text) == (times, 1, 4 * (25 * times + 1))


def test_a_program_of_one_device_adds_up_nothing():
    text = jax.jit(jnp.sum).lower(np.zeros(3, np.float32)).compile().as_text()
    assert programs.all_reduces(text) == (0, 0, 0)
