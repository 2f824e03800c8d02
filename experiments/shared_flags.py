"""Flags that several experiments share, each defined once, and the entry point.

`configuration` makes values of them.
"""

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import app, flags, logging

from experiments import command_line
from nebula_jax.models import transformer
from nebula_jax.runtime.life import process
from nebula_jax.training import masking

# What a process is, and where its files are.
flags.DEFINE_string(
    "cluster",
    "all",
    "Part of the run that this process is: all (starts every cluster here), whole (the"
    " same computation uncut), or the name of one cluster: see the experiment.",
)
flags.DEFINE_list(
    "clusters",
    [],
    "Clusters of a run: with pretrain_bert their number, 1 to 8; with"
    " scripts/issue_certificates.py their names, such as discriminator,generator:0.",
)
flags.DEFINE_string(
    "workdir", "", "Folder of the run; runs/<name of the flagfile> if empty."
)
flags.DEFINE_string(
    "data_dir",
    "package:django",
    "Text folder (see experiments/m3/README.md), or package:django.",
)
flags.DEFINE_string(
    "data",
    "",
    "Text that is read through the data access interface of --federation, in place of"
    " --data_dir: handle:NAME, or handle:NAME@LAB if another lab might serve one of"
    " that name too.",
)
flags.DEFINE_string(
    "prepared_dir", "prepared", "Folder where tokenized corpora are kept between runs."
)
flags.DEFINE_string(
    "pretrained_dir", "pretrained", "Folder of prepared models, a folder for each."
)
flags.DEFINE_string("run", "", "Folder of an earlier run, whose flags hold.")
flags.DEFINE_string("out", "", "File or folder to write.")

# The text of pre-training, and its vocabulary.
flags.DEFINE_list(
    "languages",
    ["all"],
    "Languages, such as en,sw: with finetune_xnli those to test in; with pretrain_bert"
    ' those that every cluster reads, or groups, one for each cluster, as in "en de|hi'
    ' ur", or all for those of the text folder.',
)
flags.DEFINE_string(
    "vocabulary",
    "",
    "File of the sentencepiece model that all clusters share, or with --hot_start the"
    " folder of its trimmed tokenizer. If empty, --cluster=all and --cluster=whole make"
    " one from the text, of --vocab_size pieces.",
)
flags.DEFINE_integer(
    "vocab_size",
    8000,
    "Pieces of a vocabulary that is trained here; with --hot_start, pieces of the"
    " tokenizer that are kept, the most frequent in the text.",
    lower_bound=32,
)
flags.DEFINE_integer(
    "vocab_lines",
    200_000,
    "Largest number of sentences to train the vocabulary on.",
    lower_bound=1,
)
flags.DEFINE_string(
    "hot_start",
    "",
    "Encoder that every model of the run begins with (section 4.1): a name of"
    " scripts/prepare_pretrained.py, or a checkpoint folder. If empty, random weights.",
)

# What keeps a pretrained encoder from being spoiled.
flags.DEFINE_float(
    "layer_decay",
    1.0,
    "Learning rate of a layer, as a share of that of the layer above; 1 for one rate"
    " everywhere.",
    lower_bound=0.01,
    upper_bound=1.0,
)
flags.DEFINE_bool(
    "freeze_embeddings", False, "Leave the embeddings as they are, and train the rest."
)

# Sequences and masks.
flags.DEFINE_integer("max_length", 64, "Tokens of a sequence.", lower_bound=8)
flags.DEFINE_float(
    "mask_rate", 0.15, "Share of tokens masked.", lower_bound=0.01, upper_bound=0.9
)
flags.DEFINE_enum(
    "mask_policy",
    "electra",
    list(masking.POLICIES),
    "Pieces at masked positions: mask (always [MASK]), electra (15 % kept), bert"
    " (10 % random, 10 % kept).",
)

# How clusters meet.
flags.DEFINE_string(
    "listen",
    "127.0.0.1:0",
    "HOST:PORT where a cluster waits for those that dial it; [::]:PORT for IPv6 and"
    " IPv4. With --cluster=all, that of the first one that listens: others get free"
    " ports of the same host.",
)
flags.DEFINE_string(
    "peer",
    "",
    "HOST:PORT of the listening cluster; of each that this one dials, in their order"
    " with commas between them, if they are several (a.example:7070,b.example:7071)."
    " With --federation, the lab that the other clusters have to be of (any if empty).",
)
flags.DEFINE_string(
    "federation",
    "",
    "Folder of this lab in a federation (see SECURITY.md): what crosses goes through"
    " the switches of the labs. Empty for connections of the clusters' own.",
)
flags.DEFINE_string(
    "account",
    "",
    "Account of the federation that has logged in; the folder's owner if empty.",
)
flags.DEFINE_string(
    "job", "", "Name by which the clusters of a run find each other in a federation."
)
flags.DEFINE_string(
    "wan",
    "",
    "Emulated line, such as 60mbit,15ms: rate each way, one-way delay. Also jitter=2ms,"
    " cut=5s@20s, 10mbit@60s (the rate from 60 s on), and up:...;down:... for lines"
    " that differ by direction. train_abnet also takes auto-scaled: the paper's line in"
    " proportion to the time in which this machine computes a step.",
)
flags.DEFINE_string(
    "tls",
    "auto",
    "Folder with ca.pem, cert.pem and key.pem for mutual TLS; auto makes them for the"
    " run with --cluster=all; off is plain TCP.",
)
flags.DEFINE_float(
    "connect_timeout", 60.0, "Seconds to wait for the other clusters to connect."
)
flags.DEFINE_float(
    "peer_timeout", 30.0, "Seconds of silence after which a connection counts as lost."
)
flags.DEFINE_float(
    "reconnect_timeout",
    60.0,
    "Seconds that a lost connection may take to come back; 0 ends the run at once.",
)
flags.DEFINE_float(
    "stuck_timeout",
    0.0,
    "Seconds after which a cluster that is waited for, lives and gets nothing done ends"
    " the run; ten times as long while it starts, saves or evaluates. 0 for 20 times"
    " the longest step of the run so far, at least 60.",
)

flags.DEFINE_bool(
    "trace",
    False,
    "Record what every process does and when, and what is on the line: trace.json of"
    " the run's folder opens in ui.perfetto.dev, and the summary has the time of every"
    " part. Each step is waited for, which can cost a few percent.",
)
flags.DEFINE_integer(
    "restart",
    0,
    "Times that --cluster=all starts all clusters again because one died: was killed,"
    " or lost another for longer than --reconnect_timeout. They go on from the newest"
    " step that all have saved.",
    lower_bound=0,
)

# The processes of a cluster.
flags.DEFINE_integer(
    "processes_per_cluster",
    1,
    "Processes of each cluster that --cluster=all starts here.",
    lower_bound=1,
)
flags.DEFINE_string(
    "coordinator",
    "",
    "HOST:PORT where the first process of this cluster waits for its others, if there"
    " are several; auto for what Slurm, Open MPI or Kubernetes have set.",
)
flags.DEFINE_integer(
    "num_processes", 0, "Processes of this cluster, with --coordinator.", lower_bound=0
)
flags.DEFINE_integer(
    "process_id", -1, "Number of this process in its cluster, from 0.", lower_bound=-1
)

# Devices.
flags.DEFINE_integer(
    "devices_per_cluster",
    0,
    "Devices of each cluster; 0 for all there are. On CPU that many are simulated.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "fsdp",
    1,
    "Devices among which parameters and optimizer are split, each with its own rows of"
    " a batch: parameters are gathered where they are used.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "model_parallel",
    1,
    "Devices that share the work on the same rows: heads, inner units and the"
    " vocabulary are split among them.",
    lower_bound=1,
)

flags.DEFINE_integer(
    "pipeline",
    0,
    "Micro-batches that go through the layers as a pipeline over the devices of each"
    " --fsdp group, of which each computes its own layers: for encoders too deep for"
    " one device. 0 for none.",
    lower_bound=0,
)
flags.DEFINE_bool(
    "remat",
    False,
    "Compute the activations of a block again for its gradient: less memory on GPUs and"
    " TPUs, a third more time.",
)

# Training.
flags.DEFINE_integer(
    "steps",
    1000,
    "Optimization steps.",
    lower_bound=1,
    upper_bound=2**31 - 1,  # optimizers count in int32
)
flags.DEFINE_integer(
    "batch_size", 16, "Examples of a step, in each cluster with text.", lower_bound=1
)
flags.DEFINE_integer(
    "micro_batches",
    1,
    "Parts of a batch, one after the other, whose gradients are added up: less memory,"
    " and with train_abnet they overlap on the line.",
    lower_bound=1,
)
flags.DEFINE_integer(  # JAX and Grain take 32 bits
    "seed", 0, "Seed of everything random.", lower_bound=0, upper_bound=2**32 - 1
)
flags.DEFINE_float("learning_rate", 1e-4, "Peak learning rate.", lower_bound=0.0)
flags.DEFINE_integer(
    "warmup_steps", 10_000, "Steps until the peak learning rate.", lower_bound=0
)
flags.DEFINE_float(
    "warmup_ratio",
    0.1,
    "Share of the run until the peak learning rate: of the steps of a fine-tuning, or"
    " of --total_time; a pre-training by steps has --warmup_steps.",
    lower_bound=0.0,
    upper_bound=1.0,
)
flags.DEFINE_float(
    "weight_decay", 0.0, "Decoupled weight decay of AdamW.", lower_bound=0.0
)
flags.DEFINE_float(
    "clip_norm",
    1.0,
    "Largest global norm of a model's gradient; 0 for no clipping.",
    lower_bound=0.0,
)
flags.DEFINE_float(
    "dropout", 0.1, "Dropout rate in the encoders.", lower_bound=0.0, upper_bound=0.9
)
flags.DEFINE_enum(
    "dtype",
    "float32",
    list(transformer.DTYPES),
    "Type of the operands of matrix products; sums are float32.",
)
flags.DEFINE_list(
    "bottleneck",
    [],
    "Columns that cross of a learned linear layer at the cut, in place of those of the"
    " hidden states, such as 96. Several, such as 192,96,48, the most first: each step"
    " trains another number of them, and the model then works with each.",
)
flags.DEFINE_list(
    "length_buckets",
    ["16", "32", "64"],
    "Ascending numbers of tokens in a row; a batch has examples of one bucket. The last"
    " one bounds the length of an example.",
)
flags.DEFINE_integer(
    "eval_every", 500, "Steps between evaluations on held-out text.", lower_bound=1
)
flags.DEFINE_integer(
    "eval_batches", 2, "Held-out batches of each language.", lower_bound=1
)
flags.DEFINE_integer(
    "eval_batch_size",
    64,
    "Examples of a batch where nothing is trained.",
    lower_bound=1,
)
flags.DEFINE_list(
    "emulate_compute",
    [],
    "Milliseconds that stand in for the compute of a larger model: every process sleeps"
    " them. With pretrain_m3 two numbers, as in 50,400, for each micro-batch of a"
    " generator and each step of the discriminator; with pretrain_bert one number, for"
    " each step. For timings on machines that are too small.",
)
flags.DEFINE_integer(
    "checkpoint_every", 100, "Steps between checkpoints.", lower_bound=1
)
flags.DEFINE_integer("log_every", 10, "Steps between progress lines.", lower_bound=1)
flags.DEFINE_integer(
    "allow_nonfinite", 0, "Steps with NaN or Inf that may be skipped.", lower_bound=0
)


def run(main: Callable[[], int], defaults: Mapping[str, Any] | None = None) -> None:
    """Runs an entry point: parses its flags, prints errors as one line, exits.

    Args:
      main: does the work, returns the exit status.
      defaults: of shared flags, in this experiment.
    """
    # What is imported stays: neither a collection nor Python's end looks through it
    # again, which took a quarter of a short run's CPU time.
    gc.freeze()
    for name, value in (defaults or {}).items():
        flags.FLAGS.set_default(name, value)

    def parsed(argv: Sequence[str]) -> list[str]:
        try:
            rest = command_line.parse(argv)
            command_line.check_known()
            return rest
        except (flags.Error, UnicodeDecodeError) as error:
            process.message("error: " + " ".join(str(error).split()))
            sys.exit(2)

    def guarded(argv: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)  # the libraries' chatter
        if len(argv) > 1:
            process.message(
                f"error: {argv[1]!r} is no flag; every argument is a --flag"
            )
            return 2
        status = process.guarded(main)
        process.drop_unread()
        return status

    app.run(guarded, flags_parser=parsed)
