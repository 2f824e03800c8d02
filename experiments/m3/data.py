"""The text of an M3 run: which generator reads which."""

import pathlib

from experiments import configuration
from experiments.m3 import config
from experiments.pretraining import text
from experiments.pretraining import vocabulary as shared
from nebula_jax import errors
from nebula_jax.commands import command_line
from nebula_jax.communication.wire import activity
from nebula_jax.data import language_mixture, text_folder
from nebula_jax.data.tokenizers import vocabulary as vocabularies


def without_text(run: config.Run) -> config.Run:
    """Returns the run of a process that has no text here to look groups up in.

    Raises errors.NebulaError if the languages of each generator are not written out.
    """
    generators = run.agreed.generators.strip()
    if command_line.whole_number(generators) is not None:
        who = "with --data there is" if run.local.data else "the discriminator has"
        raise errors.SettingsError(
            f"--generators={generators}: {who} no text folder to look this up in; write"
            ' the groups out, as in --generators="en de|hi ur"'
        )
    groups = run.agreed.groups()
    config.mixes(run.agreed, groups)
    return config.with_groups(run, groups)


def checked(run: config.Run, only: int | None = None) -> config.Run:
    """Returns the run with --generators written out, checked against its text.

    The text of generator `only`, or if None of all, has to be here. Text that is served
    elsewhere is checked there, when the generator comes.
    """
    if run.local.data:
        run = without_text(run)
        _check_number(run.agreed.groups(), only)
        return run
    folder, generators = text.folder(run.local), run.agreed.generators.strip()
    text_folder.check_folder(folder)
    count = command_line.whole_number(generators)
    groups = (
        language_mixture.parse_groups(generators)
        if count is None
        else text_folder.families(folder, count)
    )
    mixes = config.mixes(run.agreed, groups)
    here = slice(None) if only is None else slice(only, only + 1)
    _check_number(groups, only)
    pairs = run.agreed.parallel_pairs
    language_mixture.check_text(folder, groups[here], mixes[here], pairs)
    return config.with_groups(run, groups)


def _check_number(groups: list[list[str]], only: int | None) -> None:
    """Raises errors.SettingsError if there is no generator of this number."""
    if only is not None and only >= len(groups):
        raise errors.SettingsError(
            f"--cluster=generator:{only}: --generators has {len(groups)}, from 0"
        )


def shared_vocabulary(run: config.Run) -> pathlib.Path:
    """Returns --vocabulary, that of --init_from, or one of the text (once per text)."""
    if run.local.init_from and not run.local.vocabulary:
        earlier = configuration.flags_of_run(
            run.local.init_from, "pretrain_m3", "init_from"
        )
        return pathlib.Path(earlier["vocabulary"].value)
    groups = run.agreed.groups()
    mixes, pairs = config.mixes(run.agreed, groups), run.agreed.parallel_pairs
    return shared.shared(run.local.of_discriminator(), groups, mixes, pairs)


def text_of(
    run: config.Run,
    index: int,
    vocabulary: vocabularies.Vocabulary,
    work: activity.Work | None = None,
) -> text.Text:
    """Prepares the text of generator `index`; `work` is for --data."""
    agreed, groups = run.agreed, run.agreed.groups()
    reader = text.Reader(
        cluster=f"generator:{index}",
        languages=groups[index],
        mix=config.mixes(agreed, groups)[index],
        seed=text.seed_of(agreed.seed, index),
        rows=agreed.batch_size,
        held_out_rows=agreed.batch_size,
        # pace.last_step_after_stop: `window` steps after the next one.
        ahead=agreed.window + 2,
        most=agreed.steps,
    )
    return text.Text(agreed, run.local, reader, vocabulary, work)
