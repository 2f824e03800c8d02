"""Configurations of tables, without a command line."""

import pathlib
from typing import Any

from scripts.tables import config


def table(**values: Any) -> config.Table:
    """Returns a table's configuration in the working directory, with these values."""
    given = {
        "name": "table",
        "scale": "",
        "seeds": ("0", "1"),
        "workdir": pathlib.Path("table"),
        "results": pathlib.Path("table/results"),
        "out": pathlib.Path("table.json"),
        "data_dir": "text",
        "prepared_dir": "prepared",
        "pretrained_dir": "pretrained",
    }
    return config.Table(**given | values)
