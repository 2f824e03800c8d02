"""Measures codecs: times beside a copy of the same tensor, errors, bytes.

    python -m scripts.bench_codecs                       # tables, in some minutes
    python -m scripts.bench_codecs --out=codecs.json     # and their record

Times on a machine that does other work too mean little by themselves, so everything is
run in turn, round by round, and compared within its round: a time is the median of the
rounds, and a ratio the median of the rounds' ratios. B batch, L length, D width.
"""

import functools
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import shared_flags
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector
from nebula_jax.runtime.records import report
from scripts.bench import harness
from scripts.bench import report as bench_report

DEFAULTS = {"rounds": 11}  # of shared flags, in this benchmark
SHAPE = (128, 64, 768)  # [B, L, D] of the tensor

CODECS = (
    *("fp16", "bf16"),
    *(f"int{bits}({scale})" for bits in (8, 4) for scale in ("tensor", "row", 64)),
    "e3m0",
    "hadamard",
    "hadamard|int4(64)",
    "private(1.0)",
    "svd(0.6)",
    "svd(0.6)|fp16",
    "svd(0.2)|fp16",
    "svd(0.2, flatten=true)|fp16",
    "sparse_loco",
    "error_feedback(int4(64)|bf16)",
    "pack_tokens",
    "pack_tokens|svd(0.2)|fp16",
    "pack_ids(250002)",
)


def gaussian(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Draws independent values, the hardest to compress."""
    return jax.random.normal(jax.random.key(seed), shape)


def decaying(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Makes [B, L, D] of variance 1, whose singular values as [B L, D] are i^-0.6.

    Low rank loses about as much of it as of a trained model's hidden states.
    """
    rows, width = shape[0] * shape[1], shape[2]
    left, right = (
        jnp.linalg.qr(gaussian((size, min(rows, width)), seed + size))[0]
        for size in (rows, width)
    )
    matrix = (left * jnp.arange(1.0, left.shape[1] + 1)[None] ** -0.6) @ right.T
    return (matrix / jnp.std(matrix)).reshape(shape)


def batch(h: jax.Array) -> dict[str, jax.Array]:
    """Adds what some codecs need beside hidden states; half the tokens are real."""
    rows, length, _ = h.shape
    real = jnp.arange(rows)[:, None] * length // rows
    return {
        "h": h,
        "index": jnp.arange(rows, dtype=jnp.int32),
        "mask": jnp.arange(length)[None] < jnp.maximum(real, 1),
    }


def arrays_for(string: str, h: jax.Array) -> Any:
    """Returns the arrays that a codec is measured on."""
    if "pack_ids" in string:
        return jnp.int32(jnp.abs(h[..., 0]) * 1000)  # [B, L]: ids, not hidden states
    return batch(h) if "pack_tokens" in string else h


class Subject:
    """A codec, compiled, with the payload of one tensor."""

    def __init__(self, string: str, h: jax.Array):
        self.string = string
        self.codec = selector.as_selector(codecs.from_string(string))
        self.arrays = arrays_for(string, h)
        self.state = self.codec.init(self.arrays)
        option = self.codec.choose(self.arrays, self.state, 1)
        chosen = self.codec.codecs[option]
        self._encode, self._decode = jax.jit(chosen.encode), jax.jit(chosen.decode)
        self.payload = self.encode()[0]

    def encode(self) -> Any:
        """Returns payload and new state."""
        return self._encode(self.arrays, self.state)

    def decode(self) -> Any:
        """Returns arrays and new state."""
        return self._decode(self.payload, self.state)

    def error(self, h: jax.Array) -> float:
        """Returns the relative Frobenius error, at real positions if padding is cut."""
        sent = arrays_for(self.string, h)
        payload, _ = self._encode(sent, self.state)
        got, _ = self._decode(payload, self.state)
        if isinstance(sent, dict):
            real = sent["mask"][..., None]
            sent, got = (
                jnp.where(real, tree["h"], 0) if "mask" in tree else tree["h"]
                for tree in (sent, got)
            )
        lost, of = (np.asarray(each, np.float64) for each in (got - sent, sent))
        return float(np.linalg.norm(lost) / np.linalg.norm(of))


def measure_codecs(h: jax.Array, spread: jax.Array, rounds: int) -> dict[str, Any]:
    """Measures times, ratios and errors of every codec, beside copies."""
    source = np.asarray(h)
    target = np.empty_like(source)
    copies = {
        "copy": functools.partial(jax.jit(jnp.copy), h),
        "np.copyto": lambda: np.copyto(target, source),
    }
    subjects = {name: Subject(name, h) for name in CODECS}
    encoding = harness.time_runs(
        copies | {name: each.encode for name, each in subjects.items()}, rounds
    )
    decoding = harness.time_runs(
        {name: each.decode for name, each in subjects.items()}, rounds
    )
    return {
        "copy_ms": {name: 1e3 * statistics.median(encoding[name]) for name in copies},
        "codecs": [
            {
                "codec": name,
                "encode_ms": 1e3 * statistics.median(encoding[name]),
                "encode_over_copy": harness.ratio(encoding[name], encoding["copy"]),
                "decode_ms": 1e3 * statistics.median(decoding[name]),
                "ratio": codec_lib.nbytes(subject.payload)
                / codec_lib.nbytes(subject.arrays),
                "error_gaussian": subject.error(h),
                "error_decaying": subject.error(spread),
            }
            for name, subject in subjects.items()
        ],
    }


COLUMNS = {
    "codec": "`{codec}`",
    "encode": "{encode_ms:.1f} ms",
    "/ copy": "{encode_over_copy:.2f}",
    "decode": "{decode_ms:.1f} ms",
    "bytes": "{ratio:.4f}",
    "error": "{error_gaussian:.5f}",
    "decaying": "{error_decaying:.5f}",
}


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record."""
    copy = result["copy_ms"]
    return report.join(
        report.heading(result, f"seed {result['seed']}, {result['rounds']} rounds"),
        f"A {' x '.join(map(str, result['shape']))} float32 tensor; copying it takes"
        f" {copy['copy']:.1f} ms, `np.copyto` {copy['np.copyto']:.1f} ms. Error:"
        " relative, of Gaussian noise and of a matrix whose singular values decay.",
        bench_report.table_of(result["codecs"], COLUMNS),
    )


def main() -> int:
    """Measures, prints the tables, and writes --out."""
    begin = time.monotonic()
    seed, rounds = (flags.FLAGS[name].value for name in ("seed", "rounds"))
    h, spread = gaussian(SHAPE, seed), decaying(SHAPE, seed)
    result = {
        "seed": seed,
        "shape": list(SHAPE),
        "rounds": rounds,
        **measure_codecs(h, spread, rounds),
    }
    harness.finish(result, begin, markdown)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, DEFAULTS, names=["out", "rounds", "seed"])
