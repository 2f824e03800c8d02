"""The table of a long run's codecs: flags that can be, losses apart, the rule."""

import configured
import pytest
import tiny_tables

from experiments.abnet import config as abnet_config
from scripts import table_long_run


def figures(losses, sent):
    """What `abnet.figures` reads of a run."""
    return {
        "losses": losses,
        "summary": {
            "bleu": [{"step": 5, "dev": 40.0}, {"step": 9, "dev": 50.0, "test": 51.0}],
            "bytes": {"forward": sent, "backward": sent + 1, "padded": 1000.0},
            **{"seconds": 120.0, "commit": "abc"},
        },
    }


def test_the_flags_of_every_row_can_be():
    keys = [row.key for row in table_long_run.ROWS]
    assert len(set(keys)) == len(keys)
    for row in table_long_run.ROWS:
        run = table_long_run.run_of(row, "0", tiny_tables.table())
        found = configured.run(abnet_config, *run.arguments)
        assert str(found.agreed.bottleneck) == row.columns
        assert (found.agreed.forward_codec, found.agreed.backward_codec) == row.codecs


def test_losses_are_compared_step_by_step_and_by_parts():
    plain = [[step, 3.0 - step / 1000] for step in range(100, 2100, 100)]
    other = [[step, loss + (0.02 if step % 200 else 0.04)] for step, loss in plain]
    first, second = table_long_run.apart(other, plain, first_step=400)
    assert first["mean"] == pytest.approx(0.03, abs=0.002)
    assert first["error"] == pytest.approx(0.011 / 6**0.5, abs=1e-3)
    assert second["mean"] == pytest.approx(0.03)
    assert table_long_run.apart(plain, plain, 400)[0] == {"mean": 0.0, "error": 0.0}


def test_the_row_with_the_fewest_bytes_that_keeps_the_loss_is_chosen():
    rows, plain, sizes = [], None, (90.0, 40.0, 10.0, 20.0)
    losses = 0.0, 0.001, 0.02, 0.009
    for row, sent, lost in zip(table_long_run.ROWS, sizes, losses, strict=True):
        of_row = figures([[step, lost] for step in range(100, 3001, 100)], sent)
        plain = plain or of_row
        rows.append(table_long_run.figures_of(row, [of_row], [plain], 400))
    name = table_long_run.chosen(rows)
    assert name == table_long_run.ROWS[3].name
    rows[3]["apart"][0][-1]["mean"] = 0.011
    assert table_long_run.chosen(rows) == table_long_run.ROWS[1].name
    machine = {"cpu": "C", "cores": 2, "python": "3.11", "jax": "0.10"}
    record = {
        **{"rows": rows, "first_step": 400, "parts": (1000, 2000, 3000)},
        **{"limit": 0.01, "chosen": name, "hardware": machine, "seeds": ["0"]},
        **{"command": "c", "commit": "abc", "seconds": 480.0},
    }
    text = table_long_run.markdown(record)
    (line,) = (each for each in text.splitlines() if each.startswith("| 208"))
    assert "| 10 B | 11 B | 91 | +0.0200 ± 0.0000 |" in line
    assert "| 50.0 | 51.0 | 2 |" in line
    assert f"**{name}**" in text
    assert text.splitlines()[0].strip() == "c"
