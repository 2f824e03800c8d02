"""Measures the text that whoever receives can recover: a leak meter beside each codec.

    python -m scripts.leakage --data_dir=../shared/data     # minutes

Trains the run of Table 5 once, without any line, and attacks what would cross: H^E,
after none, a third, two thirds and all of PLM-S's layers, through some forward codecs
of Table 5, by the nearest public embedding, and by a small inverter that the attacker
trains on text of its own.

An attacker gets the hidden states of all sentences. Of its own ones it has the text as
well; the others it attacks. The worst case for the source cluster: an attacker who has
the adapters too, as the other side of a finished translator does, can make such pairs
of any text. The attacks are simple and small, so that every figure is a lower bound: a
codec at which a token is not recovered here does not protect it.

N training pairs, L source length, D width of PLM-S, V pieces.
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import configuration, shared_flags
from experiments.abnet import channels, data, translator, whole
from experiments.abnet import config as abnet_config
from nebula_jax import files
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, loopback
from nebula_jax.data import length_buckets
from nebula_jax.evaluation import leakage
from nebula_jax.models import abnet, transformer
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report, run_folder
from nebula_jax.training import partition
from scripts.tables import abnet as abnet_runs
from scripts.tables import config, sweep
from scripts.tables import runs as table_runs

FLAGFILE = "abnet_table5_tiny"
CODECS = (
    "identity",
    "svd(0.9)|fp16",
    "svd(0.6)|fp16",
    "svd(0.2)|fp16",
    "pack_tokens|int8(64)",
    "pack_tokens|hadamard|int4(64)",
)
ATTACKED = 400  # sentences, of each attacker
ROWS = 256  # that are encoded at once
NO_PIECE = -1


class Text(NamedTuple):
    """The source sentences, and the pieces that an attacker looks for."""

    ids: np.ndarray  # [N, L] int32, padded
    mask: np.ndarray  # [N, L] bool, false at padding; it crosses too
    # [N, L] int32 of `candidates`; NO_PIECE, not counted, at padding, special tokens.
    pieces: np.ndarray
    candidates: np.ndarray  # [V] int32, ids of all pieces of these sentences, ascending

    def of(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns where chosen sentences have text, [n, L] bool, and its pieces."""
        is_text = self.pieces[chosen] != NO_PIECE
        return is_text, self.pieces[chosen][is_text]


def text_of(ids: np.ndarray, special: Any) -> Text:
    """Numbers the pieces of padded ids [N, L] int32; `special` is a `SpecialTokens`."""
    is_text = ~special.contains(ids)
    candidates, places = np.unique(ids[is_text], return_inverse=True)
    pieces = np.full(ids.shape, NO_PIECE, np.int32)
    pieces[is_text] = places
    return Text(ids, ids != special.pad, pieces, candidates)


def train(table: config.Table, flagfile: pathlib.Path) -> pathlib.Path:
    """Trains what is attacked, once for all codecs, without any; returns its folder."""
    arguments = [*table.arguments(flagfile), "--cluster=whole", "--seed=0"]
    arguments += ["--bleu_sentences=1", "--held_out_pairs=0"]  # Table 5 has the BLEU
    # What was trained with other flags is another model.
    settings = [arguments[1:], table_runs.settings(flagfile)]
    workdir = table.workdir / f"run-{files.digest_of(settings)}"
    if not (workdir / "summary.json").is_file():
        workdir.mkdir(parents=True, exist_ok=True)
        run = table_runs.Run("train_abnet", abnet_runs.MODULE, tuple(arguments))
        table_runs.start(run, workdir)
    return workdir


def load(workdir: pathlib.Path) -> tuple[whole.Both, Any]:
    """Reads what `train` left: both sides, and all parameters of the source.

    Raises errors.NebulaError if it has no checkpoint.
    """
    configuration.parse_run(str(workdir), "train_abnet")
    run = abnet_config.from_flags()
    both = whole.load(run, data.split(run))
    _, trained = translator.trained_params(workdir)
    return both, partition.merge(jax.device_put(trained[0]), both.halves[0].frozen)


class Sides(NamedTuple):
    """The sentences that one attacker attacks, and those that are its own."""

    attacked: np.ndarray  # [A] int64, numbers of sentences
    own: np.ndarray  # [M] int64, likewise; none equals one that is attacked


def sides(ids: np.ndarray, seed: int, attacked: int) -> Sides:
    """Draws the sentences that an attacker attacks; all others are its own text."""
    order = length_buckets.shuffled(len(ids), seed)
    chosen = order[:attacked]
    same = {ids[number].tobytes() for number in chosen}
    own = [each for each in order[attacked:] if ids[each].tobytes() not in same]
    return Sides(chosen, np.asarray(own))


def encoded(both: whole.Both, params: Any, text: Text, layers: int) -> np.ndarray:
    """Returns H^E of all sentences, cut after so many layers: [N, L, D] float32."""
    shape = both.halves[0].task.config
    plm = dataclasses.replace(shape.source, layers=layers)
    cut = dataclasses.replace(shape, source=plm)

    @jax.jit
    def encode(params: Any, rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        def one(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            return abnet.encode(cut, params, row[0][None], row[1][None]).hidden[0]

        return jax.lax.map(one, rows, batch_size=ROWS)

    return jax.device_get(encode(params, (text.ids, text.mask)))


def public_embeddings(both: whole.Both, text: Text) -> tuple[jax.Array, jax.Array]:
    """Looks up the candidates in PLM-S: the rows of its table, [V, E] float32.

    And what its first layer would get of them at each position, [L, V, D] float32.
    """
    model, length = both.plms[0].model, text.ids.shape[1]
    params = model.params["embeddings"]

    @jax.jit
    def embed(params: Any, ids: jax.Array) -> jax.Array:
        repeated = jnp.broadcast_to(ids[:, None], (len(ids), length))
        embeddings = transformer.Embeddings(model.config)
        return embeddings.apply({"params": params}, repeated, True).swapaxes(0, 1)

    table = params["word_embeddings"]["embedding"][text.candidates]
    return jnp.asarray(table), embed(params, text.candidates)


def crossed(
    codec: str,
    spec: Mapping[str, jax.ShapeDtypeStruct],
    hidden: np.ndarray,
    mask: np.ndarray,
) -> tuple[np.ndarray, float]:
    """Sends hidden states through a codec, micro-batch by micro-batch, as a run does.

    These are `hidden` [N, L, D] float32, with their mask [N, L] bool; `spec` is that of
    a micro-batch, as a codec may lose by what it encodes together. Returns what the
    receiver has of them, and the bytes of the payloads over those of padded float32, as
    in Table 5 but for the heads of frames.
    """
    made, carrier = codecs.from_string(codec), loopback.Loopback()
    sender = carrier.sender("hidden", spec, made)
    receiver = carrier.receiver("hidden", spec, made)
    rows, found = len(spec["index"]), []
    for start in range(0, len(hidden), rows):
        # The last one is filled up with the first sentences.
        index = np.arange(start, start + rows) % len(hidden)
        arrays = {
            "hidden": hidden[index],
            "mask": mask[index],
            "index": np.int32(index),
        }
        sender.send(1, jax.device_put(arrays), start)
        found.append(jax.device_get(receiver.recv(1, start)["hidden"]))
    plain = len(found) * codec_lib.nbytes(spec["hidden"])
    return np.concatenate(found)[: len(hidden)], carrier.sent["hidden"] / plain


def attack(
    received: np.ndarray,
    text: Text,
    attacker: Sides,
    public: tuple[jax.Array, jax.Array],
    seed: int,
    steps: int,
) -> tuple[float, float]:
    """Attacks hidden states [N, L, D] float32; `public` is from `public_embeddings`.

    Returns the shares of tokens that the nearest embedding recovers, and an inverter
    that is trained in so many steps with this seed.
    """
    embeddings, by_position = public
    is_text, labels = text.of(attacker.attacked)
    is_own, own_labels = text.of(attacker.own)
    attacked = received[attacker.attacked]
    near = jax.vmap(leakage.nearest, (1, 0), 1)(attacked, by_position)
    inverted = leakage.inverted(
        attacked[is_text],
        received[attacker.own][is_own],
        own_labels,
        embeddings,
        jax.random.key(seed),
        steps,
    )
    near, inverted = jax.device_get((near, inverted))
    return float(np.mean(near[is_text] == labels)), float(np.mean(inverted == labels))


def gather(
    both: whole.Both,
    params: Any,
    table5: Mapping[str, Any],
    seeds: Sequence[int],
    attacked: int = ATTACKED,
    steps: int = leakage.STEPS,
) -> dict[str, Any]:
    """Makes all attacks; returns the record without its provenance.

    `both` and the source's `params` are from `load`; `table5` is the record whose BLEU
    stands beside a codec, or {}. Each of `seeds` has an attacker, who attacks so many
    sentences, with an inverter trained in so many steps.
    """
    agreed, plm = both.batches[0].agreed, both.plms[0]
    special, rows = plm.tokenizer.special, both.texts[0].train
    longest, layers = agreed.length_buckets[-1], plm.model.config.layers
    text = text_of(rows.rows(np.arange(len(rows)), longest, special.pad), special)
    attackers = {seed: sides(text.ids, seed, attacked) for seed in seeds}
    spec = channels.hidden_spec(agreed, longest, plm.model.config.width)
    public = public_embeddings(both, text)
    bleu = {each["forward"]: each["bleu"] for each in table5.get("rows", ())[::-1]}
    table: list[dict[str, Any]] = [
        {"codec": codec, "bleu": bleu.get(codec, []), "depths": []} for codec in CODECS
    ]
    for depth in sorted({round(layers * part / 3) for part in range(4)}):
        hidden = encoded(both, params, text, depth)
        for row in table:
            received, ratio = crossed(row["codec"], spec, hidden, text.mask)
            near, inverted = zip(
                *(
                    attack(received, text, each, public, seed, steps)
                    for seed, each in attackers.items()
                ),
                strict=True,
            )
            found = {"depth": depth, "ratio": ratio, "nearest": near}
            row["depths"].append(found | {"inversion": inverted})
            process.message(f"{row['codec']}, cut after {depth} layers")
    return {
        "pairs": len(text.ids),
        "attacked": attacked,
        "candidates": len(text.candidates),
        "guess": [_most_frequent(text, each) for each in attackers.values()],
        "rows": table,
    }


def _most_frequent(text: Text, attacker: Sides) -> float:
    """Returns the share of the attacked tokens that its most frequent piece is."""
    counts = np.bincount(text.of(attacker.own)[1])
    return float(np.mean(text.of(attacker.attacked)[1] == counts.argmax()))


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record."""
    depths = [each["depth"] for each in result["rows"][0]["depths"]]

    def at(place: int, attack: str, row: Mapping[str, Any]) -> str:
        shares = [100 * share for share in row["depths"][place][attack]]
        return sweep.spread(shares, ".1f")

    columns = [
        sweep.Column("forward codec", lambda row: f"`{row['codec']}`"),
        sweep.Column("bytes", lambda row: row["depths"][-1]["ratio"], ".3f"),
        sweep.Column(
            "BLEU", lambda row: sweep.spread(row["bleu"], ".2f") or report.NOTHING
        ),
        *(
            sweep.Column(f"{title}, {depth}", functools.partial(at, place, attack))
            for title, attack in (("nearest", "nearest"), ("trained", "inversion"))
            for place, depth in enumerate(depths)
        ),
    ]
    return report.join(
        report.heading(result, report.seeds(result)),
        f"Shares of tokens, in percent. Each seed's attacker attacks"
        f" {result['attacked']} of {result['pairs']:,} sentences; the others, but for"
        f" those that equal one of these, are its own text. It chooses among"
        f" {result['candidates']:,} pieces, those of all these sentences; the most"
        f" frequent is right for {100 * statistics.fmean(result['guess']):.1f} %.",
        "Tokens recovered from H^E, after so many layers of PLM-S with their trained"
        " adapters:",
        sweep.table(columns, result["rows"], "l" + "r" * (len(columns) - 1)),
    )


def main() -> int:
    """Trains what is attacked, attacks it, writes and prints the record."""
    begin = time.monotonic()
    table = config.from_flags("leakage", seeds=3)
    flagfile = table_runs.flagfile(FLAGFILE)
    path = config.RESULTS / "table5_tiny.json"
    table5 = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    with run_folder.lock(table.workdir):
        with process.timed("training what is attacked"):
            workdir = train(table, flagfile)
        found = gather(*load(workdir), table5, list(map(int, table.seeds)))
    result = report.provenance(time.monotonic() - begin, seeds=table.seeds) | found
    table_runs.write(result, markdown(result), table.out)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=config.FLAGS)
