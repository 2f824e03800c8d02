"""Published runs of BERT's pre-training: their hours, and the cost model beside them.

Every figure has its source. Of the paper that trains BERT in 12 days only the abstract
is at hand: neither the model's size nor the hardware are in it. So its days stand
beside a plan, and nothing is derived from them.

N nodes, A micro-batches of a step.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nebula_jax.parallel import data_parallel
from nebula_jax.parallel.planner import Line
from nebula_jax.runtime.records import report

HOUR = 3600.0  # seconds
V100_FLOPS = 125e12  # of 16-bit matrix products (vendor)
ADAPTER = 100e9 / 8  # bytes/s of an InfiniBand adapter (EDR)
DELAY = 10e-6  # seconds, one way: our assumption
NVIDIA = "NVIDIA/DeepLearningExamples@155578a7, PyTorch/LanguageModeling/BERT/README.md"
DEVLIN = "Devlin et al. 2018 (arXiv 1810.04805), A.2"
MULTI_NODE = (
    "Multi-node Bert-pretraining: Cost-efficient Approach (arXiv 2008.00177), abstract"
)


class Run(NamedTuple):
    """A published run."""

    name: str
    model: str
    device: str
    devices: int
    """0 if that is not published."""
    hours: float
    source: str


def _nvidia(system: str, devices: int, hours: Mapping[int, float]) -> list[Run]:
    """Returns NVIDIA's runs of the LAMB recipe, with 16-bit products.

    Args:
      system: of each node.
      devices: of a node.
      hours: N -> hours.
    """
    return [
        Run(f"{nodes} x {system}", "BERT-large", "V100", nodes * devices, each, NVIDIA)
        for nodes, each in hours.items()
    ]


DGX_1 = _nvidia("DGX-1", 8, {1: 153.16, 4: 39.27, 16: 10.36})
DGX_2H = _nvidia("DGX-2H", 16, {1: 58.4, 4: 15.35, 16: 3.94, 64: 1.124})
RUNS = (
    Run("the abstract's 12 days", "BERT", "not in the abstract", 0, 288, MULTI_NODE),
    Run("Devlin et al., 4 days", "BERT-base", "TPU chip", 16, 96, DEVLIN),
    Run("Devlin et al., 4 days", "BERT-large", "TPU chip", 64, 96, DEVLIN),
    *DGX_1,
    *DGX_2H,
    Run(
        "24hBERT, ends by time",
        "BERT-large, length 128",
        "GPU of 12 GB",
        8,
        24,
        "Izsak et al. 2021 (arXiv 2104.07705); IntelLabs/academic-budget-bert",
    ),
    Run(
        "Cramming, ends by time",
        "like BERT",
        "consumer GPU",
        1,
        24,
        "Geiping and Goldstein 2022 (arXiv 2212.14034); JonasGeiping/cramming",
    ),
    Run(
        "MosaicBERT, to GLUE 79.6",
        "MosaicBERT-base",
        "A100 of 80 GB",
        8,
        1.13,
        "Portes et al. 2023 (arXiv 2312.17482), abstract",
    ),
    Run(
        "MosaicML's baseline, to GLUE 83.3",
        "BERT-base",
        "A100 of 80 GB",
        8,
        11.5,
        "mosaicml/examples@54b82684, examples/benchmarks/bert/README.md",
    ),
)


class System(NamedTuple):
    """One of NVIDIA's systems."""

    name: str
    devices: int
    rate: float
    """Bytes/s of a node's network adapters together."""
    throughput: Mapping[int, Mapping[int, float]]
    """Length -> N -> sequences/s, with 16-bit products (NVIDIA)."""
    rows: Mapping[int, int]
    """Length -> sequences of a device (NVIDIA)."""
    micro_batches: int
    """A, in the training run of one node at length 128; N have an N-th (NVIDIA)."""
    runs: Sequence[Run]


SYSTEMS = (
    System(
        name="DGX-1",
        devices=8,
        rate=4 * ADAPTER,
        throughput={
            128: {1: 874.24, 4: 3089.76, 16: 12144.64},
            512: {1: 195.93, 4: 700.16, 16: 2746.368},
        },
        rows={128: 16, 512: 4},
        micro_batches=512,
        runs=DGX_1,
    ),
    System(
        name="DGX-2H",
        devices=16,
        rate=8 * ADAPTER,
        throughput={
            128: {1: 3379.2, 4: 12709.88, 16: 51937.28, 64: 188088.32},
            512: {1: 625.66, 4: 2386.38, 16: 9932.8, 64: 37478.4},
        },
        rows={128: 64, 512: 8},
        micro_batches=64,
        runs=DGX_2H,
    ),
)


def utilization(run: Run, flops: float) -> float:
    """Returns the share of their FLOP/s that a run's V100s reached.

    Args:
      run: of the LAMB recipe.
      flops: of that recipe.
    """
    return flops / (run.hours * HOUR * run.devices * V100_FLOPS)


def runs(flops: float) -> list[dict[str, Any]]:
    """Returns the published runs.

    Args:
      flops: of the LAMB recipe.
    """
    return [
        each._asdict()
        | {
            "device_hours": each.devices * each.hours if each.devices else None,
            "utilization": utilization(each, flops) if each.device == "V100" else None,
        }
        for each in RUNS
    ]


def _sync(
    system: System, nodes: int, parameters: int, micro_batches: int
) -> data_parallel.AllReduce:
    """Returns NVIDIA's exchange: 16-bit gradients in one piece, nothing meanwhile."""
    ring = data_parallel.Ring(nodes, Line(system.rate, DELAY))
    return data_parallel.AllReduce((ring,), parameters, micro_batches, 2.0)


def scaling(parameters: int) -> list[dict[str, Any]]:
    """Returns the model's weak scaling beside the published; nothing is fitted.

    A step has one micro-batch, and takes one node as long as its published throughput
    makes it.

    Args:
      parameters: of the model.
    """
    found = []
    for system, length in itertools.product(SYSTEMS, (128, 512)):
        throughput = system.throughput[length]
        rows = system.devices * system.rows[length]
        compute = data_parallel.compute_of(rows / throughput[1])
        for nodes in list(throughput)[1:]:
            step = data_parallel.step_of(compute, _sync(system, nodes, parameters, 1))
            found.append(
                {
                    "system": system.name,
                    "length": length,
                    "nodes": nodes,
                    "published": throughput[nodes] / throughput[1],
                    "planned": nodes * compute.micro_batch / step.seconds,
                }
            )
    return found


def hours(parameters: int, steps: int) -> list[dict[str, Any]]:
    """Returns the model's hours of NVIDIA's training runs beside the published.

    The mean step of both lengths is planned: their accumulation goes by N alike.

    Args:
      parameters: of the model.
      steps: of a run.

    Returns:
      Rows; None for a run from which the others are planned.
    """
    found = []
    for system in SYSTEMS:
        measured = [
            data_parallel.Measured(
                _sync(system, nodes, parameters, system.micro_batches // nodes),
                run.hours * HOUR / steps,
            )
            for run in system.runs
            for nodes in [run.devices // system.devices]
        ]
        alone = data_parallel.compute_of(measured[0].seconds / system.micro_batches)
        last = len(measured) - 1
        fits = {
            "from_one": ({0}, data_parallel.Fit(alone, 0.0)),
            "from_first_two": ({0, 1}, data_parallel.fit(measured[:2])),
            "from_ends": ({0, last}, data_parallel.fit([measured[0], measured[-1]])),
        }
        for number, (run, each) in enumerate(zip(system.runs, measured, strict=True)):
            planned = {
                name: None
                if number in used
                else data_parallel.predict(fitted, each.sync).seconds * steps / HOUR
                for name, (used, fitted) in fits.items()
            }
            found.append({"run": run.name, "published": run.hours} | planned)
    return found


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the published runs, and the model beside NVIDIA's.

    Args:
      result: with `published`, `scaling` and `hours` of the functions here.
    """
    adapters = "; ".join(
        f"{each.name} with {each.rate / ADAPTER:.0f}, of {8 * ADAPTER / 1e9:g} Gbit/s"
        for each in SYSTEMS
    )
    return report.join(
        "Published runs, for comparison; none of these figures is planned or measured"
        " here. `of 125 TFLOP/s`: the share that the FLOPs of the LAMB recipe are of"
        " what its V100s could do in that time.",
        _runs(result["published"]),
        "Weak scaling, as a multiple of one node's sequences/s, beside NVIDIA's."
        " Nothing is fitted: one node's published sequences/s, and a ring over all of a"
        f" node's InfiniBand adapters at their full rate ({adapters}), give the rest."
        " Assumed beside these adapters: 16-bit gradients in one piece and not"
        " overlapped, as in NVIDIA's training script; and one micro-batch a step,"
        " without accumulation, which the source leaves open. (At the"
        f" {SYSTEMS[0].throughput[128][1]:g} and {SYSTEMS[0].throughput[512][1]:g}"
        f" sequences/s of one DGX-1 here, its {DGX_1[0].hours:g} hours of training,"
        " which accumulates, would have been"
        f" {result['hours_without_accumulation']:.0f}.)",
        _scaling(result["scaling"]),
        "Hours of the training runs, which do accumulate. `from one node`: computing is"
        " that of one node, and only the ring is added: optimistic. `fitted`: the time"
        " of a micro-batch and the constant of a round are those of two runs. A"
        " constant from the first two, where it is a small part of a step, is poorly"
        " determined; what lies between two runs is predicted better than what lies"
        " beyond them.",
        _hours(result["hours"]),
    )


def _runs(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["run", "model", "devices", "hours", "device-hours", "of 125 TFLOP/s"]
    cells = [
        [
            *(row["name"], row["model"]),
            f"{row['devices']} x {row['device']}" if row["devices"] else row["device"],
            f"{row['hours']:g}",
            report.figure(row["device_hours"], ",.0f"),
            report.figure(row["utilization"], ".0%"),
            row["source"],
        ]
        for row in rows
    ]
    return report.table([*header, "source"], cells, "lllrrrl")


def _scaling(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [
            *(row["system"], str(row["length"]), str(row["nodes"])),
            *(f"{row['published']:.2f}", f"{row['planned']:.2f}"),
            _off(row["planned"], row["published"]),
        ]
        for row in rows
    ]
    header = ["system", "length", "nodes", "published", "planned", "off by"]
    return report.table(header, cells)


def _hours(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ("from_one", "from_first_two", "from_ends")
    cells = [
        [
            *(row["run"], f"{row['published']:g}"),
            *(
                f"{row[name]:.3g} ({_off(row[name], row['published'])})"
                if row[name] is not None
                else "given"
                for name in names
            ),
        ]
        for row in rows
    ]
    header = ["run", "published", "from one node", "fitted on the first two"]
    return report.table([*header, "fitted on first and last"], cells)


def _off(planned: float, published: float) -> str:
    return f"{planned / published - 1:+.1%}"
