import nebula_command
import pytest
from absl import flags


@pytest.fixture(autouse=True)
def flags_are_parsed():
    """As a command has them, for tests that set some."""
    flags.FLAGS(["test"])


@pytest.fixture
def lab(tmp_path):
    """The folder of a lab, on which the command `nebula` runs in this process."""
    return nebula_command.Lab(tmp_path / "s")
