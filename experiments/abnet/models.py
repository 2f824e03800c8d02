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
from nebula_jax.models.pretrained import packages
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import rules
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import devices
from nebula_jax.training import abnet as abnet_training
from nebula_jax.training import cut, optimizers, partition
from nebula_jax.training import state as train_state

SOURCE, TARGET = 0, 1  # streams of randomness that follow from the seed
STATE_RNG = 10  # + SOURCE or TARGET
DROPOUT_RNG = 20


class Plm(NamedTuple):
    """A pretrained model with its tokenizer."""

    model: pretrained.Pretrained
    tokenizer: tokenizers.Tokenizer
    digest: str
    """Differs if the model or its vocabulary does."""


class Half(NamedTuple):
    """One side of the cut model, on its cluster's devices."""

    task: abnet_training.Task
    mesh: Mesh
    is_trained: partition.IsTrained
    """True for the paths of parameters that are trained."""
    fresh: mesh_lib.ShardedInit
    """A TrainState of the trained parameters, at step 0."""
    frozen: Any
    """The other parameters."""
    program: cut.Front | cut.Back
    """Computes hidden states and gradients, codecs included."""
    apply: Callable[
        [train_state.TrainState, Any, Any],
        tuple[train_state.TrainState, dict[str, jax.Array]],
    ]
    """`TrainState.apply_gradients` of (state, gradients, metrics), without waiting; the
    state is used up."""
    rng: Callable[[train_state.TrainState], jax.Array]
    """State before a step -> key of the step."""

    def params(self, state: train_state.TrainState) -> Any:
        """Returns all parameters of this side."""
        return partition.merge(state.params, self.frozen)

    def with_key(
        self, micro_batches: Iterable[Any], state: train_state.TrainState
    ) -> Iterator[tuple[Any, jax.Array]]:
        """Yields each micro-batch of a step with the step's key."""
        rng = self.rng(state)
        return ((batch, rng) for batch in micro_batches)


def load(run: config.Run, folder: pathlib.Path, layers: int = 0) -> Plm:
    """Reads a pretrained model for one side.

    Args:
      run: of this process.
      folder: of the checkpoint and its tokenizer.
      layers: how many to keep, from the first; 0 for all.

    Raises:
      errors.NebulaError: if it is no checkpoint with a tokenizer, or has fewer
        positions than the longest row has tokens.
    """
    agreed, longest = run.agreed, run.agreed.length_buckets[-1]
    model, tokenizer = pretrained.load_with_tokenizer(
        folder, dropout=agreed.plm_dropout, dtype=agreed.dtype, log=process.message
    )
    if model.config.max_length < longest:
        raise errors.SettingsError(
            f"--length_buckets ends with {longest}; {folder} has"
            f" {model.config.max_length} positions"
        )
    checkpoint = checkpoint_folder.digest(folder)
    if layers:
        model = pretrained.first_layers(model, layers)
    shape = dataclasses.replace(model.config, remat=run.local.remat)
    model = model._replace(config=shape)
    digest = files.digest_of([tokenizer.digest, checkpoint, layers])
    return Plm(model, tokenizer, digest)


def folder_of(local: config.Local, name: str) -> pathlib.Path:
    """Returns the checkpoint folder that a flag names, fetched if need be."""
    return packages.resolve_checkpoint(name, local.pretrained_dir, process.message)


def load_source(run: config.Run) -> Plm:
    """Reads PLM-S, with its whole table: rows are only looked up in it.

    Raises:
      errors.SettingsError: if a bottleneck is wider than it.
    """
    local = run.local
    plm = load(run, folder_of(local, local.source_model), local.source_layers)
    _check_rank(run.agreed, plm.model.config)
    return plm


def source_half(
    run: config.Run,
    plm: Plm,
    target: transformer.Config,
    codecs: config.Codecs | None = None,
) -> Half:
    """Puts the source side's model on this cluster's devices.

    Args:
      run: of this process.
      plm: PLM-S.
      target: shape of PLM-T.
      codecs: of the run, if it chooses by itself; else its settings have them.
    """
    agreed, codecs = run.agreed, codecs or run.agreed.codecs
    translator = model(agreed, plm.model.config, target)
    task = make_task(agreed, translator, source=plm.tokenizer.special)
    # Dropout belongs to the example: the same key at every step.
    key = jax.random.fold_in(jax.random.key(agreed.seed), DROPOUT_RNG)
    is_trained = is_trained_source(run.local)
    mesh = _mesh(run)
    front = cut.front(
        activations.on(mesh, functools.partial(abnet_training.front_half, task)),
        codecs.forward,
        codecs.backward,
        is_trained=is_trained,
        has_loss=True,
    )
    params = params_of(agreed, translator, plm.model, SOURCE)
    return _half(
        run,
        SOURCE,
        task,
        mesh,
        params,
        plm.model.config,
        is_trained=is_trained,
        program=front,
        rng=lambda state: key,
    )


def target_half(
    run: config.Run,
    plm: Plm,
    source: transformer.Config,
    is_trained: partition.IsTrained,
    codecs: config.Codecs | None = None,
) -> Half:
    """Puts the target side's model on this cluster's devices.

    Args:
      run: of this process.
      plm: PLM-T.
      source: shape of PLM-S.
      is_trained: True for the paths that are trained (`target_model.is_trained`).
      codecs: of the run, if it chooses by itself; else its settings have them.
    """
    agreed, codecs = run.agreed, codecs or run.agreed.codecs
    translator = model(agreed, source, plm.model.config)
    task = make_task(agreed, translator, target=plm.tokenizer.special)
    mesh = _mesh(run)
    back = cut.back(
        activations.on(mesh, functools.partial(abnet_training.back_half, task)),
        codecs.forward,
        codecs.backward,
        is_trained=is_trained,
        sharding=mesh_lib.batch_sharding(mesh),
    )
    params = params_of(agreed, translator, plm.model, TARGET)
    return _half(
        run,
        TARGET,
        task,
        mesh,
        params,
        plm.model.config,
        is_trained=is_trained,
        program=back,
        rng=train_state.TrainState.key,
    )


def _half(
    run: config.Run,
    side: int,
    task: abnet_training.Task,
    mesh: Mesh,
    params: Any,
    plm: transformer.Config,
    *,
    is_trained: partition.IsTrained,
    program: cut.Front | cut.Back,
    rng: Callable[[train_state.TrainState], jax.Array],
) -> Half:
    optimizer = make_optimizer(run.agreed)
    trained, frozen = partition.split(params, is_trained)
    planned = fresh(run, side, mesh, trained)
    apply = mesh_lib.jit_step(
        lambda state, grads, metrics: state.apply_gradients(grads, optimizer, metrics),
        mesh,
        rules.RULES,
        planned.shapes,
        inputs=(None, None),  # gradients come as the half's program leaves them
    )
    placed = place_frozen(mesh, frozen, plm)
    return Half(task, mesh, is_trained, planned, placed, program, apply, rng)


def fresh(run: config.Run, side: int, mesh: Mesh, trained: Any) -> mesh_lib.ShardedInit:
    """Plans the state of a side at step 0."""
    key = jax.random.fold_in(jax.random.key(run.agreed.seed), STATE_RNG + side)
    create = functools.partial(
        train_state.create, trained, make_optimizer(run.agreed), key
    )
    return mesh_lib.sharded_init_from_arrays(mesh, create)


def begun(
    run: config.Run, plm: Plm, half: Half, side: int, beginning: bottleneck.Start
) -> Half:
    """Returns a half whose bottleneck, or what reads it, begins as given.

    Args:
      run: of this process.
      plm: the side's pretrained model.
      half: from `source_half` or `target_half`.
      side: SOURCE or TARGET.
      beginning: see `experiments.abnet.bottleneck`.
    """
    shape = half.task.config
    params = params_of(run.agreed, shape, plm.model, side, beginning)
    trained, _ = partition.split(params, half.is_trained)
    return half._replace(fresh=fresh(run, side, half.mesh, trained))


def _mesh(run: config.Run) -> Mesh:
    """Returns this cluster's devices, over which a micro-batch is spread."""
    agreed = run.agreed
    return devices.mesh(run.local.layout(), agreed.batch_size, agreed.micro_batches)


def is_trained_source(local: config.Local) -> partition.IsTrained:
    """Returns a function of a path, True if the source side trains it.

    It trains its adapters and the table of lengths; with --train_all everything.
    """
    return partition.train_all if local.train_all else abnet_params.is_trained


def _check_rank(agreed: config.Agreed, source: transformer.Config) -> None:
    if agreed.bottleneck > source.width:
        raise errors.SettingsError(
            f"--bottleneck={agreed.bottleneck}: more than the source model's width,"
            f" {source.width}"
        )


def model(
    agreed: config.Agreed, source: transformer.Config, target: transformer.Config
) -> abnet.Config:
    """Returns the translator's shape.

    Args:
      agreed: of the run.
      source: shape of PLM-S.
      target: shape of PLM-T.

    Raises:
      errors.SettingsError: if the cross attention's heads do not divide its width, or
        a bottleneck is wider than what it narrows.
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
    agreed: config.Agreed,
    translator: abnet.Config,
    source: tokenizers.SpecialTokens | None = None,
    target: tokenizers.SpecialTokens | None = None,
) -> abnet_training.Task:
    """Returns what a side needs besides its parameters and its batch.

    Args:
      agreed: of the run.
      translator: its shape.
      source, target: special tokens of the two tokenizers; a cluster has one of them.
    """
    none = tokenizers.SpecialTokens(0, 0, 0, 0, 0, 0)
    return abnet_training.Task(
        translator,
        source or none,
        target or none,
        agreed.label_smoothing,
        agreed.source_corruption,
        has_dropout=agreed.plm_dropout > 0 or agreed.adapter_dropout > 0,
    )


def make_optimizer(agreed: config.Agreed) -> optax.GradientTransformation:
    """Returns Adam as in section 4.2, whose second β1 must be β2; ε 1e-8."""
    schedule = optimizers.inverse_square_root(agreed.learning_rate, agreed.warmup_steps)
    return optimizers.adam(schedule, beta1=0.9, beta2=0.98, epsilon=1e-8)


def params_of(
    agreed: config.Agreed,
    translator: abnet.Config,
    plm: pretrained.Pretrained,
    side: int,
    beginning: bottleneck.Start | None = None,
) -> Any:
    """Returns all parameters of a side at step 0.

    Args:
      agreed: of the run.
      translator: its shape.
      plm: the side's pretrained model.
      side: SOURCE or TARGET.
      beginning: of the bottleneck, if there is one; None: zeros.
    """
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
    """Puts frozen parameters on the devices, in the dtype of the model's products.

    Args:
      mesh: of the cluster.
      frozen: from `partition.split`.
      plm: shape of the pretrained model.
    """
    frozen = mixed_precision.cast_kernels(frozen, plm.operands)
    sharding = rules.shardings(mesh, rules.RULES, frozen)
    return mesh_lib.put(frozen, sharding)


def trained_parameters(state: train_state.TrainState) -> int:
    """Returns how many parameters are trained."""
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))
