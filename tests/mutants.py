"""What a mutation run of cosmic-ray leaves to a project: a sample, and whose tests.

    scripts/run pip install cosmic-ray
    scripts/run cosmic-ray init cosmic-ray.toml mutants.sqlite
    scripts/run cr-filter-operators mutants.sqlite cosmic-ray.toml
    scripts/run python -m tests.mutants mutants.sqlite          # keeps a sample
    scripts/run cosmic-ray exec cosmic-ray.toml mutants.sqlite  # hours; can be resumed
    scripts/run cr-report --surviving-only --show-diff mutants.sqlite

In a checkout of its own: `exec` writes each mutant into the tree. Then it runs this
module without a database, which runs the tests that mirror the file that git calls
changed, or those of its folder if there are none.
"""

import pathlib
import random
import sqlite3
import subprocess
import sys

SEED = 0
SAMPLE = {"communication/wire": 40, "security": 40, "data": 40}
SAMPLE |= {"training": 20, "parallel": 20}
"""Folder -> mutants of it that are tried."""
PYTEST = ["-m", "pytest", "-x", "-q", "-n0", "-o", "addopts=--import-mode=importlib"]


def keep_sample(database: pathlib.Path) -> None:
    """Removes the mutants that a filter skips, and those that are not drawn."""
    with sqlite3.connect(database) as connection:
        # By content: a job's number is drawn anew by each `init`.
        rows = connection.execute(
            "SELECT module_path, operator_name, occurrence, job_id FROM mutation_specs"
            " WHERE job_id NOT IN (SELECT job_id FROM work_results) ORDER BY 1, 2, 3"
        ).fetchall()
        connection.execute("CREATE TEMP TABLE kept (job_id)")
        for folder, count in SAMPLE.items():
            there = [row for row in rows if row[0].startswith(f"nebula_jax/{folder}/")]
            drawn = [row[-1:] for row in random.Random(SEED).sample(there, count)]
            connection.executemany("INSERT INTO kept VALUES (?)", drawn)
        for table in ("mutation_specs", "work_results", "work_items"):
            kept = "(SELECT job_id FROM kept)"
            connection.execute(f"DELETE FROM {table} WHERE job_id NOT IN {kept}")


def mirrored(module: pathlib.PurePath) -> list[str]:
    """Returns the files with a module's tests, or the folder where they would be."""
    folder = pathlib.Path("tests", *module.parts[1:-1])
    name = module.parent.name if module.stem == "__init__" else module.stem
    return [*map(str, folder.glob(f"test_{name}*.py"))] or [str(folder)]


def run_tests() -> int:
    """Runs the tests of the module that is changed."""
    git = ["git", "diff", "--name-only", "--", "nebula_jax"]
    changed = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    tests = [each for path in changed.split() for each in mirrored(pathlib.Path(path))]
    return subprocess.run(
        [sys.executable, *PYTEST, "-m", "not slow", *tests]
    ).returncode


if __name__ == "__main__":
    sys.exit(keep_sample(pathlib.Path(sys.argv[1])) if sys.argv[1:] else run_tests())
