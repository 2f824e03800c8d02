"""Flags of the ABNet experiment, and what is made of them before a loop begins."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax
from absl import flags

import nebula_jax
from experiments import shared_flags
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs
from nebula_jax.communication.wire import frames
from nebula_jax.data import tokenizers
from nebula_jax.models import abnet, transformer
from nebula_jax.training import abnet as abnet_training
from nebula_jax.training import optimizers

SOURCE_MODEL = flags.DEFINE_string(
    "source_model",
    "e5-small",
    "PLM-S: a name of scripts/prepare_pretrained.py, or a checkpoint folder.",
)
TARGET_MODEL = flags.DEFINE_string("target_model", "minilm-l6", "PLM-T, likewise.")
SOURCE_LAYERS = flags.DEFINE_integer(
    "source_layers",
    0,
    "Layers of PLM-S that are used, from the first; 0 for all.",
    lower_bound=0,
)
TARGET_LAYERS = flags.DEFINE_integer(
    "target_layers", 0, "Layers of PLM-T, likewise.", lower_bound=0
)
TRAIN_ALL = flags.DEFINE_bool(
    "train_all",
    False,
    "Whether every parameter is trained and not the adapters alone: for models without"
    " pretraining, the baseline of Table 2.",
)
OBJECTIVE = flags.DEFINE_enum(
    "objective",
    "cmlm",
    list(abnet.OBJECTIVES),
    "cmlm: masked target and mask-predict, as in ABNet; ar: one token after the other"
    " and beam search.",
)
ENCODER_INNER = flags.DEFINE_integer(
    "encoder_inner", 512, "Inner width of an encoder adapter.", lower_bound=1
)
DECODER_INNER = flags.DEFINE_integer(
    "decoder_inner", 512, "Inner width of a decoder adapter.", lower_bound=1
)
CROSS_HEADS = flags.DEFINE_integer(
    "cross_heads", 4, "Heads of the cross attention.", lower_bound=1
)
DTYPE = flags.DEFINE_enum(
    "compute_dtype", "float32", list(transformer.DTYPES), "Operands of products."
)
PLM_DROPOUT = flags.DEFINE_float(
    "plm_dropout", 0.1, "In frozen layers.", lower_bound=0.0, upper_bound=0.9
)
ADAPTER_DROPOUT = flags.DEFINE_float(
    "adapter_dropout", 0.1, "In decoder adapters.", lower_bound=0.0, upper_bound=0.9
)
SOURCE_CORRUPTION = flags.DEFINE_float(
    "source_corruption",
    0.0,
    "Share of a source sentence that is masked; 0.1 in ABNet's code, not in its paper.",
    lower_bound=0.0,
    upper_bound=0.9,
)
BUCKETS = flags.DEFINE_list(
    "buckets",
    ["16", "32", "64"],
    "Tokens of a row; a batch has sentences of one bucket. The last one is the longest"
    " sentence there may be.",
)
TRUNCATE = flags.DEFINE_bool(
    "truncate", False, "Whether a longer sentence is cut instead of refused."
)
MICRO_BATCHES = flags.DEFINE_integer(
    "micro_batches", 4, "Parts of a batch that overlap on the line.", lower_bound=1
)
AHEAD = flags.DEFINE_integer(
    "ahead", 4, "Micro-batches whose gradient may be awaited.", lower_bound=1
)
FORWARD_CODEC = flags.DEFINE_string(
    "forward_codec", "identity", "Of hidden states, as in pack_tokens|svd(0.6)|fp16."
)
BACKWARD_CODEC = flags.DEFINE_string(
    "backward_codec", "identity", "Of their gradients, likewise."
)
PEAK_RATE = flags.DEFINE_float(
    "peak_rate", 5e-4, "Learning rate after the warm-up.", lower_bound=0.0
)
RISE_STEPS = flags.DEFINE_integer(
    "rise_steps", 4000, "Steps of the warm-up.", lower_bound=0
)
LABEL_SMOOTHING = flags.DEFINE_float(
    "label_smoothing", 0.1, "ε.", lower_bound=0.0, upper_bound=0.9
)
HEAD_STEPS = flags.DEFINE_integer(
    "head_steps",
    300,
    "Steps in which cluster T trains an MLM head on its own text first, if PLM-T has"
    " none; nothing crosses.",
    lower_bound=0,
)
BLEU_EVERY = flags.DEFINE_integer(
    "bleu_every", 1000, "Steps between BLEUs on dev.", lower_bound=1
)
BLEU_SENTENCES = flags.DEFINE_integer(
    "bleu_sentences", 200, "Of dev, and at the end of each test set.", lower_bound=1
)
BEAMS = flags.DEFINE_integer(
    "beams", 4, "Beams (ar) or length candidates (cmlm).", lower_bound=1
)
ITERATIONS = flags.DEFINE_integer("iterations", 10, "Of mask-predict.", lower_bound=1)

# Clusters must agree on these; the rest of the flags each may set as it likes.
AGREED = (
    *("steps", "batch_size", "seed", "checkpoint_every", "pair", "buckets"),
    *("objective", "encoder_inner", "decoder_inner", "cross_heads", "compute_dtype"),
    *("plm_dropout", "adapter_dropout", "source_corruption", "micro_batches"),
    *("forward_codec", "backward_codec", "peak_rate", "rise_steps", "label_smoothing"),
    *("bleu_every", "bleu_sentences", "beams", "iterations"),
)


def check() -> None:
    """Raises FlagError (or CodecError) at what cannot work."""
    buckets()
    codecs.from_string(FORWARD_CODEC.value)
    codecs.from_string(BACKWARD_CODEC.value)
    if shared_flags.BATCH_SIZE.value % MICRO_BATCHES.value:
        raise shared_flags.FlagError(
            f"--micro_batches={MICRO_BATCHES.value} does not divide"
            f" --batch_size={shared_flags.BATCH_SIZE.value}"
        )
    if shared_flags.DEVICES.value:
        _check_rows_divide(
            shared_flags.DEVICES.value // shared_flags.MODEL_PARALLEL.value
        )


def _check_rows_divide(replicas: int) -> None:
    rows = shared_flags.BATCH_SIZE.value // MICRO_BATCHES.value
    if rows % replicas:
        raise shared_flags.FlagError(
            f"a micro-batch of {rows} (--batch_size, --micro_batches) does not divide"
            f" over {replicas} devices"
        )


def mesh() -> jax.sharding.Mesh:
    """This cluster's devices, over which a micro-batch is spread."""
    found = shared_flags.mesh()
    _check_rows_divide(found.shape["data"])
    return found


def buckets() -> tuple[int, ...]:
    """--buckets, ascending."""
    text = ",".join(BUCKETS.value)
    if not all(part.strip().isdecimal() for part in BUCKETS.value):
        raise shared_flags.FlagError(
            f"--buckets={text}: expected numbers such as 16,32"
        )
    found = tuple(int(part) for part in BUCKETS.value)
    if not found or list(found) != sorted(set(found)) or found[0] < 4:
        raise shared_flags.FlagError(f"--buckets={text}: must ascend, from 4 or more")
    if len(found) > 250:
        raise shared_flags.FlagError(f"--buckets={text}: at most 250")
    return found


def settings(pair: str) -> dict[str, Any]:
    """What a Hello compares, and a checkpoint is checked against."""
    values = {f"--{name}": flags.FLAGS[name].value for name in AGREED}
    return values | {"--pair": pair, "--buckets": ",".join(BUCKETS.value)}


def hello(
    cluster: str,
    agreed: Mapping[str, Any],
    checkpoints: list[int],
    config: transformer.Config,
    examples: Mapping[str, Any],
    own: Mapping[str, str],
) -> frames.Hello:
    """This cluster's Hello.

    Args:
      cluster: its name.
      agreed: from `settings`.
      checkpoints: steps it could go on from.
      config: of its pretrained model, whose shape the other side's adapters need.
      examples: the fingerprint of its examples' ids (`data.agreement`).
      own: digests of its model and text, which must be the same when a run goes on.
    """
    details = {"model": dataclasses.asdict(config), "examples": dict(examples)}
    details["own"] = dict(own)
    return frames.Hello(
        cluster, nebula_jax.__version__, dict(agreed), tuple(checkpoints), details
    )


def peers_own(peer: frames.Hello) -> dict[str, str]:
    """Digests of the peer's model and text, as its Hello has them.

    Raises:
      FlagError: if it has none.
    """
    own = peer.details.get("own")
    if not isinstance(own, dict) or len(own) > 8:
        raise shared_flags.FlagError(
            f"{peer.cluster} did not say what its run is made of"
        )
    return {f"the peer's {name}": str(value)[:64] for name, value in own.items()}


def peers_config(peer: frames.Hello) -> transformer.Config:
    """The shape of the peer's pretrained model.

    Raises:
      FlagError: if that is not what its Hello has.
    """
    fields = peer.details.get("model")
    wanted = {each.name: each.type for each in dataclasses.fields(transformer.Config)}
    if not isinstance(fields, dict) or fields.keys() != wanted.keys():
        raise shared_flags.FlagError(f"{peer.cluster} did not say what its model is")
    sizes = ("vocab_size", "layers", "width", "heads", "feed_forward", "max_length")
    if not all(type(fields[name]) is int and fields[name] > 0 for name in sizes):
        raise shared_flags.FlagError(f"{peer.cluster} has a model of impossible shape")
    return transformer.Config(**fields)


def config(source: transformer.Config, target: transformer.Config) -> abnet.Config:
    """The translator's shape."""
    if target.width % CROSS_HEADS.value:
        raise shared_flags.FlagError(
            f"--cross_heads={CROSS_HEADS.value} does not divide the target model's"
            f" width, {target.width}"
        )
    return abnet.Config(
        source=source,
        target=target,
        objective=OBJECTIVE.value,
        encoder_inner=ENCODER_INNER.value,
        decoder_inner=DECODER_INNER.value,
        heads=CROSS_HEADS.value,
        dropout=ADAPTER_DROPOUT.value,
        max_target_length=buckets()[-1],
    )


def controls(words: tokenizers.Tokenizer) -> tokenizers.SpecialTokens:
    """Ids of a tokenizer that are no text."""
    return words.special


def task(
    shape: abnet.Config,
    source: tokenizers.SpecialTokens | None = None,
    target: tokenizers.SpecialTokens | None = None,
) -> abnet_training.Task:
    """What a side needs to know besides its parameters and its batch.

    A cluster that has only one of the two tokenizers names that one.
    """
    nothing = tokenizers.SpecialTokens(0, 0, 0, 0, 0, 0)
    return abnet_training.Task(
        shape,
        source or nothing,
        target or nothing,
        LABEL_SMOOTHING.value,
        SOURCE_CORRUPTION.value,
        has_dropout=PLM_DROPOUT.value > 0 or ADAPTER_DROPOUT.value > 0,
    )


def optimizer() -> optax.GradientTransformation:
    """Adam of section 4.2: β 0.9 and 0.98, ε 1e-8 (the second β1 is printed for β2)."""
    schedule = optimizers.inverse_square_root(PEAK_RATE.value, RISE_STEPS.value)
    return optimizers.adam(schedule, beta1=0.9, beta2=0.98, epsilon=1e-8)


def forward_codec() -> codecs.Compression:
    """Reads --forward_codec."""
    return codecs.from_string(FORWARD_CODEC.value)


def backward_codec() -> codecs.Compression:
    """Reads --backward_codec."""
    return codecs.from_string(BACKWARD_CODEC.value)


def evaluation_codec(spec: codec_lib.Spec) -> codecs.Compression:
    """Of hidden states in evaluation: the forward codec, so that both are alike.

    One with a state, such as a memory of what was sent, has none that fits sentences
    that are not trained on: then plain fp16, packed.
    """
    compression = forward_codec()
    if jax.tree.leaves(jax.eval_shape(lambda: compression.codec.init(spec))):
        return codecs.from_string("pack_tokens|fp16")
    return compression


def is_evaluated(step: int) -> bool:
    """Whether dev is translated after `step`."""
    return step % BLEU_EVERY.value == 0 or step == shared_flags.STEPS.value
