"""A plan of BERT's pre-training on many nodes: its days, device-hours and bytes.

Nothing is measured: `parallel/data_parallel.py` has the time of a step from FLOPs of
the model's shape, and from devices and lines that are assumed. Each assumption is a
line of the record.

L length, D width, F feed-forward, V vocabulary, M masked tokens of a sequence, P
fragments.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from nebula_jax.models import transformer
from nebula_jax.parallel import data_parallel
from nebula_jax.parallel.planner import Compute, Line
from nebula_jax.runtime.records import report
from scripts.plans import bert_published as published
from scripts.plans import text

DAY = 86400.0  # seconds
GIGABIT = 1e9 / 8  # bytes/s
NODES, DEVICES = 32, 4  # of each node: our choice
RATES = (1, 10, 25)  # Gbit/s
INSIDE = Line(10e9, 10e-6)  # from device to device of a node: our assumption
NETWORK_DELAY = 50e-6  # seconds, one way: our assumption
OVERLAP = 0.8  # of a backward pass: our assumption
FITS = {128: 16, 512: 4}  # length -> sequences in 16 GB with BERT-large (NVIDIA)
UPDATE_BYTES = 7 * 4  # parameter and two moments in and out, gradient in
CLUSTERS, CLUSTER_RATE = 2, 10  # Gbit/s of their nodes' lines: our choice
WAN = Line(60e6 / 8, 0.015)  # a slow line, as in section 4.3


@dataclasses.dataclass(frozen=True)
class Device:
    """A device, as its vendor describes it."""

    name: str
    flops: float
    """FLOP/s of 16-bit matrix products, at most."""
    memory: float
    """Bytes/s of its memory."""
    utilization: float = 0.3
    """Share of `flops` that the model's matrix products reach."""


ORDINARY = Device("T4 class", 65e12, 320e9)
LARGER = Device("V100 class", published.V100_FLOPS, 900e9)
PLANNED = (ORDINARY, LARGER)


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run whose sequences have one length."""

    length: int
    """L."""
    masked: int
    """M."""
    batch: int
    """Sequences of a step."""
    steps: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A published recipe."""

    name: str
    size: str
    """Key of transformer.SIZES."""
    phases: tuple[Phase, ...]
    source: str

    @property
    def config(self) -> transformer.Config:
        """The shape of the model, with the vocabulary of bert-base-uncased."""
        return transformer.config_of_size(
            self.size, vocab_size=30_522, max_length=512, token_types=2
        )

    @property
    def sequences(self) -> int:
        """The sequences of the run."""
        return sum(each.steps * each.batch for each in self.phases)

    @property
    def tokens(self) -> int:
        """The tokens of the run, padding included."""
        return sum(each.steps * each.batch * each.length for each in self.phases)

    @property
    def flops(self) -> float:
        """The FLOPs of the run."""
        return sum(
            each.steps * each.batch * flops(self.config, each.length, each.masked)
            for each in self.phases
        )


BASE = Recipe(
    "BERT-base, batches of 256",
    "base",
    (Phase(128, 20, 256, 900_000), Phase(512, 80, 256, 100_000)),
    f"{published.DEVLIN}: 1,000,000 steps of 256 sequences, 90 % of them with 128"
    " tokens and 10 % with 512",
)
LARGE = Recipe(
    "BERT-large, LAMB",
    "large",
    (Phase(128, 20, 65_536, 7_038), Phase(512, 80, 32_768, 1_563)),
    f"{published.NVIDIA}: 7,038 steps of 65,536 sequences with 128 tokens, 1,563 of"
    " 32,768 with 512",
)
RECIPES = (BASE, LARGE)


def parameters(config: transformer.Config) -> int:
    """Counts the parameters of a masked language model (`models/masked_lm.py`)."""
    width = config.width
    embeddings = config.vocab_size + config.max_length + config.token_types
    head = width * width + 3 * width + config.vocab_size
    return (embeddings + 2) * width + config.layers * _of_layer(config) + head


def _of_layer(config: transformer.Config) -> int:
    width, inner = config.width, config.feed_forward
    return 4 * width * (width + 1) + (2 * width + 1) * inner + 5 * width


def fragments(config: transformer.Config, number: int) -> tuple[int, ...]:
    """Counts the parameters of each fragment, as `training.local_steps.split` has them.

    Args:
      config: of the encoder.
      number: P; divides the layers.
    """
    embeddings = config.vocab_size + config.max_length + config.token_types + 2
    found = [config.layers // number * _of_layer(config)] * number
    found[0] += embeddings * config.width
    found[-1] += parameters(config) - sum(found)
    return tuple(found)


def flops(config: transformer.Config, length: int, masked: int) -> float:
    """Counts the FLOPs of a sequence, forward and backward, without recomputation.

    They are those of the matrix products, 2 m n k each, as `count.flops` counts them;
    the backward pass has two products for each.

    Args:
      config: of the encoder.
      length: L.
      masked: M, places that have logits.
    """
    width = config.width
    layer = 8 * length * width**2 + 4 * length * width * config.feed_forward
    attention = 4 * length**2 * width
    head = 2 * masked * width * (width + config.vocab_size)
    return 3.0 * (config.layers * (layer + attention) + head)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way in which all devices come to have one model."""

    name: str
    fields: Mapping[str, Any]
    """Fields of AllReduce, or of LocalSteps."""
    fragments: int = 0
    """P, of local steps; 0 for all-reduce."""


LADDER = (
    Way("float32, after every micro-batch", {"in_every_micro_batch": True}),
    Way("float32, once a batch", {}),
    Way("float32, once a batch, overlapped", {"overlap": OVERLAP}),
    Way(
        "16 bits, once a batch, overlapped",
        {"overlap": OVERLAP, "bytes_per_value": 2.0},
    ),
)
ACROSS = (
    LADDER[-1],
    Way(
        "local steps, streaming: H 100, P 4, tau 5, e3m0(256)",
        {"inner_steps": 100, "delay": 5, "bits_per_value": 4.125},
        4,
    ),
    Way(
        "local steps, sparse: H 30, sparse_loco(64,4096)",
        {"inner_steps": 30, "bits_per_value": 14 * 64 / 4096},
        1,
    ),
)


def cost(
    recipe: Recipe, device: Device, way: Way, rate: float, is_across: bool = False
) -> data_parallel.Cost:
    """Returns the cost of a run.

    Args:
      recipe: of the run.
      device: of which each node has DEVICES.
      way: of LADDER or ACROSS.
      rate: Gbit/s of each node's line.
      is_across: True if the nodes are CLUSTERS clusters, each with one slow line.
    """
    nodes = NODES // CLUSTERS if is_across else NODES
    rings = (
        data_parallel.Ring(DEVICES, INSIDE),
        data_parallel.Ring(nodes, Line(rate * GIGABIT, NETWORK_DELAY)),
    )
    values = parameters(recipe.config)
    found = []
    for phase in recipe.phases:
        micro_batches, compute = _compute(recipe, device, phase)
        sync: data_parallel.Sync
        if way.fragments:
            inner = data_parallel.AllReduce(
                rings, values, micro_batches, **LADDER[-1].fields
            )
            parts = fragments(recipe.config, way.fragments)
            sync = data_parallel.LocalSteps(inner, CLUSTERS, WAN, parts, **way.fields)
        else:
            outer = (data_parallel.Ring(CLUSTERS, WAN),) * is_across
            sync = data_parallel.AllReduce(
                (*rings, *outer), values, micro_batches, **way.fields
            )
        found.append((phase.steps, data_parallel.step_of(compute, sync)))
    return data_parallel.total(found)


def _compute(recipe: Recipe, device: Device, phase: Phase) -> tuple[int, Compute]:
    """Returns A, and the time of a micro-batch on a device."""
    rows = phase.batch // (NODES * DEVICES)
    of_micro_batch = min(rows, FITS[phase.length])
    count = of_micro_batch * flops(recipe.config, phase.length, phase.masked)
    seconds = count / (device.utilization * device.flops)
    update = UPDATE_BYTES * parameters(recipe.config) / device.memory
    return rows // of_micro_batch, data_parallel.compute_of(seconds, update)


def record() -> dict[str, Any]:
    """Returns the plan's numbers; JSON can hold them."""
    return {
        "assumptions": _assumptions(),
        "recipes": [
            {
                "name": each.name,
                "source": each.source,
                "parameters": parameters(each.config),
                "sequences": each.sequences,
                "tokens": each.tokens,
                "flop": each.flops,
            }
            for each in RECIPES
        ],
        "rows": [row for recipe in RECIPES for row in _rows(recipe)],
        "published": published.runs(LARGE.flops),
        "scaling": published.scaling(parameters(LARGE.config)),
        "hours": published.hours(
            parameters(LARGE.config), sum(each.steps for each in LARGE.phases)
        ),
        "hours_without_accumulation": sum(
            each.steps * each.batch / published.SYSTEMS[0].throughput[each.length][1]
            for each in LARGE.phases
        )
        / published.HOUR,
    }


def _rows(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yields the ladder on each line, and then what two clusters far apart can do."""
    cases = [(way, rate, False) for way in LADDER for rate in RATES]
    cases += [(way, CLUSTER_RATE, True) for way in ACROSS]
    steps = sum(each.steps for each in recipe.phases)
    for way, rate, is_across in cases:
        costs = [cost(recipe, device, way, rate, is_across) for device in PLANNED]
        yield {
            "recipe": recipe.name,
            "way": way.name,
            "line": f"{CLUSTERS} clusters, {_mbit(WAN)}"
            if is_across
            else f"{rate} Gbit/s",
            "bytes": costs[0].sent / steps,
            "devices": [
                {
                    "device": device.name,
                    "days": each.seconds / DAY,
                    "device_hours": each.seconds / published.HOUR * NODES * DEVICES,
                    "exposed_share": each.exposed_share,
                }
                for device, each in zip(PLANNED, costs, strict=True)
            ],
        }


def _mbit(line: Line) -> str:
    return f"{8 * line.bytes_per_second / 1e6:g} Mbit/s"


def _assumptions() -> list[str]:
    devices = "; ".join(
        f"{each.name}: {each.flops / 1e12:g} TFLOP/s of 16-bit matrix products and"
        f" {each.memory / 1e9:g} GB/s of memory (vendor)"
        for each in PLANNED
    )
    fits = " or ".join(f"{rows} of {length} tokens" for length, rows in FITS.items())
    used = published.utilization(published.DGX_1[0], LARGE.flops)
    return [
        f"{NODES} nodes with {DEVICES} devices each: our choice. {devices}.",
        f"The model's matrix products reach {ORDINARY.utilization:.0%} of that: our"
        f" assumption. NVIDIA's hours on one DGX-1, of the V100 class, amount to"
        f" {used:.0%}. With the 2 sequences that a batch of 256 leaves for each device"
        " they are likely to reach less.",
        f"A micro-batch has {fits}, or as many as there are: these fit 16 GB with"
        f" BERT-large ({published.NVIDIA}). A batch of 256 is one micro-batch of 2, so"
        " nothing is accumulated.",
        f"Gradients are added up in a ring of each node's devices"
        f" ({INSIDE.bytes_per_second / 1e9:g} GB/s, {1e6 * INSIDE.delay_seconds:g} µs:"
        " our assumption), then in a ring of nodes at the full rate of their lines"
        f" ({1e6 * NETWORK_DELAY:g} µs: our assumption).",
        f"Overlapped: {OVERLAP:.0%} of the last micro-batch's backward pass runs"
        " meanwhile, and that is two thirds of a micro-batch: our assumption.",
        f"The optimizer reads and writes {UPDATE_BYTES} bytes a parameter (float32"
        " parameter and two moments in and out, gradient in), as fast as the memory"
        " allows: our assumption.",
        f"At {_mbit(WAN)} and {1e3 * WAN.delay_seconds:g} ms the nodes are {CLUSTERS}"
        f" clusters, each with its share of the batch, {CLUSTER_RATE} Gbit/s inside,"
        " and one slow line. Within a cluster, local steps too have 16 bits, once a"
        " batch, overlapped; a fragment crosses while inner steps go on. That they"
        " reach the same loss is not in this table.",
        "Devices are never idle for any other reason: no input, evaluation, checkpoint"
        " or slow node, and no time of a round beside its bytes and delays. So the days"
        " are optimistic: NVIDIA's runs below took longer than this model has it.",
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record."""
    parts = []
    for recipe in result["recipes"]:
        rows = [row for row in result["rows"] if row["recipe"] == recipe["name"]]
        parts += [
            f"**{recipe['name']}**: {text.number(recipe['parameters'])} parameters,"
            f" {text.number(recipe['sequences'])} sequences,"
            f" {text.number(recipe['tokens'])} tokens, {recipe['flop']:.3g} FLOP"
            f" ({recipe['source']}).",
            _table(rows),
        ]
    return report.join(
        f"Planned, not measured: BERT on {NODES} nodes with {DEVICES} devices each.",
        *parts,
        "`exposed` is the share of the time in which devices wait for gradients,"
        " within a node or from others. Bytes are what each node sends in a step, or"
        " each cluster over its slow line.",
        "\n".join(f"- {each}" for each in result["assumptions"]),
        published.markdown(result),
    )


def _table(rows: list[Mapping[str, Any]]) -> str:
    names = [each["device"] for each in rows[0]["devices"]]
    header = ["gradients", "line", "bytes a step"]
    for name in names:
        header += [f"{name}: days", "device-hours", "exposed"]
    cells = [
        [
            *(row["way"], row["line"], f"{text.number(row['bytes'])}B"),
            *(
                cell
                for each in row["devices"]
                for cell in (
                    f"{each['days']:.2f}",
                    f"{each['device_hours']:,.0f}",
                    f"{each['exposed_share']:.1%}",
                )
            ),
        ]
        for row in rows
    ]
    return report.table(header, cells, "llr" + "rrr" * len(names))
