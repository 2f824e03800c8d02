"""Runs of pretrain_bert, one text for all the runs of a module."""

import pytest
import tiny_runs

TINY = {
    "languages": "en de",
    "vocab_size": 120,
    "model_size": "nano",
    "max_length": 16,
    "batch_size": 4,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "dropout": 0.1,
    "eval_every": 20,
    "eval_batches": 1,
    "eval_batch_size": 4,
    "log_every": 4,
    "connect_timeout": 60,
    "peer_timeout": 20,
    "devices_per_cluster": 1,
    "inner_steps": 4,
    "fragments": 2,
    "delay": 1,
}


class Runs(tiny_runs.Runs):
    module = "experiments.pretrain_bert"

    def flags(self) -> dict:
        return TINY | {"data_dir": self.text, "prepared_dir": "prepared"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that share prepared text; each test names its own workdir."""
    return Runs(tmp_path_factory.mktemp("runs"))
