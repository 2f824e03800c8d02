"""The figures of the paper's tables."""

import json
import pathlib
from typing import Any

PAPER: dict[str, Any] = json.loads(
    (pathlib.Path(__file__).parent / "paper.json").read_text()
)
