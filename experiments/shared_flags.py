"""Flags of several experiments that have no class in common, and the entry point."""

import dataclasses
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import app, flags, logging

from experiments import command_line, fields
from experiments import configuration as _defines_its_flags  # noqa: F401
from nebula_jax.runtime.life import process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """The flags that classes of several experiments name, or that no run keeps."""

    run: str = fields.to_begin_with("", "Folder of an earlier run, whose flags hold.")
    out: str = fields.of_run("", "File or folder to write.")
    clusters: tuple[str, ...] = fields.to_begin_with(
        (),
        "Clusters of a run: with pretrain_bert their number, 1 to 8; with"
        " scripts/issue_certificates.py their names, such as"
        " discriminator,generator:0.",
    )
    languages: tuple[str, ...] = fields.of_data(
        ("all",),
        "Languages, such as en,sw: with finetune_xnli those to test in; with"
        " pretrain_bert those that every cluster reads, or all for those of the text"
        " folder.\n"
        'Groups, one for each cluster: "en de|hi ur".',
    )
    length_buckets: tuple[int, ...] = fields.of_data(
        (16, 32, 64),
        "Ascending numbers of tokens in a row; a batch has examples of one bucket. The"
        " last one bounds the length of an example.",
    )
    eval_batch_size: int = fields.of_training(
        64, "Examples of a batch where nothing is trained.", lower=1
    )
    warmup_steps: int = fields.of_training(
        10_000, "Steps until the peak learning rate."
    )
    warmup_ratio: float = fields.of_training(
        0.1,
        "Share of the run until the peak learning rate: of the steps of a fine-tuning,"
        " or of --total_time; a pre-training by steps has --warmup_steps.",
        upper=1.0,
    )
    clip_norm: float = fields.of_training(
        1.0, "Largest global norm of a model's gradient; 0 for no clipping."
    )
    layer_decay: float = fields.of_training(
        1.0,
        "Learning rate of a layer, as a share of that of the layer above; 1 for one"
        " rate everywhere.",
        lower=0.01,
        upper=1.0,
    )
    freeze_embeddings: bool = fields.of_training(
        False, "Leave the embeddings as they are, and train the rest."
    )
    bottleneck: int = fields.of_line(
        0,
        "Columns of a learned linear layer at the cut, which cross in place of those"
        " of the hidden states; 0 for none.",
    )
    pipeline: int = fields.for_experts(
        0,
        "Micro-batches that go through the layers as a pipeline over the devices of"
        " each --fsdp group, of which each computes its own layers: for encoders too"
        " deep for one device. 0 for none.",
    )


fields.define(Shared)


def run(
    main: Callable[[], int],
    defaults: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
) -> None:
    """Runs an entry point: parses its flags, prints errors as one line, exits.

    Args:
      main: does the work, returns the exit status.
      defaults: of shared flags, in this command.
      names: of the flags that the command has beside those that its file defines.
    """
    # What is imported stays: neither a collection nor Python's end looks through it
    # again, which took a quarter of a short run's CPU time.
    gc.freeze()
    for name, value in (defaults or {}).items():
        flags.FLAGS.set_default(name, value)
    for name in names:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

    def parsed(argv: Sequence[str]) -> list[str]:
        wanted = {each.lstrip("-") for each in argv[1:] if each.startswith("-")}
        if wanted & {"help", "helpshort", "helpfull"}:
            about = sys.modules["__main__"].__doc__ or ""
            print(command_line.help_text(about, full="helpfull" in wanted))
            sys.exit(0)
        try:
            rest = command_line.parse(argv)
            command_line.check_known()
            return rest
        except (flags.Error, UnicodeDecodeError) as error:
            text = str(error).removeprefix("ERROR:: ")  # absl's
            process.message("error: " + " ".join(text.split()))
            sys.exit(2)

    def guarded(argv: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)  # the libraries' chatter
        if len(argv) > 1:
            process.message(
                f"error: {argv[1]!r} is no flag; every argument is a --flag"
            )
            return 2
        status = process.guarded(lambda: command_line.with_flags(main))
        process.drop_unread()
        return status

    app.run(guarded, flags_parser=parsed)
