"""The models of an ABNet run, and the half of the cut model that each cluster trains.

D width of a pretrained model.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from experiments.abnet import config
from nebula_jax import errors, files
from nebula_jax.data import tokenizers
from nebula_jax.models import (
    abnet,
    abnet_params,
    activations,
    bottleneck,
    mixed_precision,
    pretrained,
    transformer,
)
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import trimming
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import rules
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import checkpoints
from nebula_jax.training import abnet as abnet_training
from nebula_jax.training import checkpoint_files, cut, optimizers, partition
from nebula_jax.training import state as train_state

SOURCE, TARGET = SIDES = (0, 1)  # streams of randomness that follow from the seed
ROLES = ("source", "target")
STATE_RNG = 10  # + SOURCE or TARGET
DROPOUT_RNG = 20


class Plm(NamedTuple):
    """A pretrained model with its tokenizer."""

    model: pretrained.Pretrained
    tokenizer: tokenizers.Tokenizer
    digest: str  # differs if the model or its vocabulary does
    is_trained: partition.IsTrained  # True for paths of parameters that its side trains


class Half(NamedTuple):
    """One side of the cut model, on its cluster's devices."""

    task: abnet_training.Task
    mesh: Mesh
    fresh: mesh_lib.ShardedInit  # a TrainState of the trained parameters, at step 0
    frozen: Any
    program: cut.Front | cut.Back  # hidden states and gradients, codecs included
    apply: Callable[
        [train_state.TrainState, Any, Any],
        tuple[train_state.TrainState, dict[str, jax.Array]],
    ]
    """`TrainState.apply_gradients` of (state, gradients, metrics), without waiting; the
    state is used up."""
    rng: Callable[[train_state.TrainState], jax.Array]  # state -> key of the next step

    def params(self, state: train_state.TrainState) -> Any:
        """Returns all parameters of this side."""
        return partition.merge(state.params, self.frozen)

    def with_key(
        self, micro_batches: Iterable[Any], state: train_state.TrainState
    ) -> Iterator[tuple[Any, jax.Array]]:
        """Yields each micro-batch of a step with the step's key."""
        rng = self.rng(state)
        return ((batch, rng) for batch in micro_batches)


def load(
    run: config.Run, folder: pathlib.Path, layers: int = 0, new_head: bool = False
) -> Plm:
    """Reads a pretrained model for one side, with its first `layers`, or all if 0.

    It trains its adapters, the table of lengths, a bottleneck, and its MLM head if this
    is a `new_head`, made here. Raises errors.NebulaError if it is no checkpoint with a
    tokenizer, or has fewer positions than the longest row has tokens.
    """
    agreed, local = run.agreed, run.local
    model, tokenizer = pretrained.load_with_tokenizer(
        folder,
        agreed.length_buckets[-1],
        dropout=agreed.plm_dropout,
        dtype=agreed.dtype,
        remat=local.remat,
        log=process.message,
    )
    if model.config.body is not None:
        raise errors.SettingsError(
            f"{folder} is a {model.family}; ABNet's adapters and its decoding token by"
            " token are made for BERT's layers: name a model of another family"
        )
    checkpoint = checkpoint_folder.digest(folder)
    if layers:
        model = trimming.first_layers(model, layers)
    digest = files.digest_of([tokenizer.digest, checkpoint, layers])
    is_trained = functools.partial(abnet_params.is_trained, mlm_head=new_head)
    return Plm(model, tokenizer, digest, is_trained)


def load_source(run: config.Run) -> Plm:
    """Reads PLM-S, with its whole table: rows are only looked up in it.

    Raises errors.SettingsError if a bottleneck is wider than it.
    """
    local = run.local
    plm = load(run, local.checkpoint(local.source_model), local.source_layers)
    _check_rank(run.agreed, plm.model.config)
    return plm


def half(
    run: config.Run,
    side: int,
    plm: Plm,
    other: transformer.Config,
    beginning: bottleneck.Start | None = None,
) -> Half:
    """Puts the model of a side, SOURCE or TARGET, on this cluster's devices.

    `other` is the shape of the other side's. `beginning` is that of a bottleneck, if
    there is one; if it is None, a checkpoint brings it.
    """
    agreed, own = run.agreed, plm.model.config
    source, target = (own, other) if side == SOURCE else (other, own)
    translator = model(agreed, source, target)
    task = make_task(agreed, translator, plm.tokenizer.special)
    layout = run.local.layout()
    mesh = devices.mesh(layout, agreed.batch_size, agreed.micro_batches)
    if side == SOURCE:
        program: cut.Front | cut.Back = cut.front(
            activations.on(mesh, functools.partial(abnet_training.front, task)),
            agreed.codecs.forward,
            agreed.codecs.backward,
            is_trained=plm.is_trained,
            has_loss=True,
        )
    else:
        program = cut.back(
            activations.on(mesh, functools.partial(abnet_training.back, task)),
            agreed.codecs.forward,
            agreed.codecs.backward,
            is_trained=plm.is_trained,
            sharding=mesh_lib.batch_sharding(mesh),
        )
    params = params_of(agreed, translator, plm.model, side, beginning)
    trained, frozen = partition.split(params, plm.is_trained)
    optimizer, key = make_optimizer(agreed), jax.random.key(agreed.seed)
    fresh = mesh_lib.sharded_init_from_arrays(
        mesh,
        lambda: train_state.create(
            trained, optimizer, jax.random.fold_in(key, STATE_RNG + side)
        ),
    )
    fresh = _begun(run, side, plm, fresh)
    apply = mesh_lib.jit_step(
        lambda state, grads, metrics: state.apply_gradients(grads, optimizer, metrics),
        mesh,
        rules.RULES,
        fresh.shapes,
        inputs=(None, None),  # gradients come as the half's program leaves them
    )
    # The source's dropout belongs to the example: the same key at every step.
    dropout = jax.random.fold_in(key, DROPOUT_RNG)
    rng = (lambda state: dropout) if side == SOURCE else train_state.TrainState.key
    placed = place_frozen(mesh, frozen, own)
    return Half(task, mesh, fresh, placed, program, apply, rng)


def _begun(
    run: config.Run, side: int, plm: Plm, fresh: mesh_lib.ShardedInit
) -> mesh_lib.ShardedInit:
    """Returns a side's first state; with --init_from what that run trained of it."""
    if not run.local.init_from:
        return fresh
    workdir, step = pathlib.Path(run.local.init_from), config.earlier_step(run)
    own = checkpoints.folder_of(workdir, ROLES[side]) / f"{step:08d}"
    is_whole = not own.is_dir()
    name = "whole" if is_whole else ROLES[side]
    # A run that has saved a step needs the earlier one no more, which may have gone.
    if config.begun_step(run) is None and side == SOURCE:
        known = checkpoint_files.about(checkpoints.folder_of(workdir, name), step)
        if known["fingerprints"].get("source_model") != plm.digest:
            raise errors.SettingsError(
                f"--init_from={workdir} has another --source_model than this run"
            )

    def params_of(saved: Any) -> Any:
        own = saved[side] if is_whole else saved
        return own["state"]["params"]

    return checkpoints.begun_with(fresh, workdir, name, step, params_of)


def _check_rank(agreed: config.Agreed, source: transformer.Config) -> None:
    if agreed.bottleneck > source.width:
        raise errors.SettingsError(
            f"--bottleneck={agreed.bottleneck}: more than the source model's width,"
            f" {source.width}"
        )


def model(
    agreed: config.Agreed, source: transformer.Config, target: transformer.Config
) -> abnet.Config:
    """Returns the translator's shape, given those of PLM-S and PLM-T.

    Raises errors.SettingsError if the cross attention's heads do not divide its width,
    or a bottleneck is wider than what it narrows.
    """
    if target.width % agreed.cross_attention_heads:
        raise errors.SettingsError(
            f"--cross_attention_heads={agreed.cross_attention_heads} does not divide"
            f" the target model's width, {target.width}"
        )
    _check_rank(agreed, source)
    return abnet.Config(
        source=source,
        target=target,
        objective=agreed.objective,
        encoder_inner=agreed.encoder_adapter_dim,
        decoder_inner=agreed.decoder_adapter_dim,
        heads=agreed.cross_attention_heads,
        dropout=agreed.adapter_dropout,
        max_target_length=agreed.length_buckets[-1],
        bottleneck=agreed.bottleneck,
    )


def make_task(
    agreed: config.Agreed, translator: abnet.Config, special: tokenizers.SpecialTokens
) -> abnet_training.Task:
    """Returns what a side needs besides its parameters and its batch."""
    return abnet_training.Task(
        translator,
        special,  # each side reads its own alone
        special,
        agreed.label_smoothing,
        agreed.source_corruption,
        has_dropout=agreed.plm_dropout > 0 or agreed.adapter_dropout > 0,
    )


def make_optimizer(agreed: config.Agreed) -> optax.GradientTransformation:
    """Returns Adam as in section 4.2, whose second β1 must be β2; ε 1e-8."""
    schedule = optimizers.inverse_square_root(agreed.learning_rate, agreed.warmup_steps)
    return optimizers.adam(schedule, beta2=0.98, epsilon=1e-8)


def params_of(
    agreed: config.Agreed,
    translator: abnet.Config,
    plm: pretrained.Pretrained,
    side: int,
    beginning: bottleneck.Start | None = None,
) -> Any:
    """Returns all parameters of a side at step 0; arguments as for `half`."""
    init, narrowed = (
        (abnet_params.init_source, abnet_params.narrowed_source),
        (abnet_params.init_target, abnet_params.narrowed_target),
    )[side]
    wide = dataclasses.replace(translator, bottleneck=0)
    rng = jax.random.fold_in(jax.random.key(agreed.seed), side)
    new = jax.jit(functools.partial(init, wide))(rng)
    params = abnet_params.with_pretrained(wide, new, plm.params)
    if not translator.bottleneck:
        return params
    blank = bottleneck.blank(translator.source.width, translator.bottleneck)
    return narrowed(params, beginning or blank)


def place_frozen(mesh: Mesh, frozen: Any, plm: transformer.Config) -> Any:
    """Puts frozen parameters on the devices, in the dtype of the model's products."""
    frozen = mixed_precision.cast_kernels(frozen, plm.operands)
    return mesh_lib.put(frozen, rules.shardings(mesh, rules.RULES, frozen))


def trained_parameters(state: train_state.TrainState) -> int:
    """Returns how many parameters are trained."""
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))
