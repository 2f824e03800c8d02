"""The part of a mutation run that cosmic-ray leaves to a project: a sample, and tests.

    scripts/run pip install cosmic-ray
    scripts/run cosmic-ray init cosmic-ray.toml mutants.sqlite
    scripts/run cr-filter-operators mutants.sqlite cosmic-ray.toml
    scripts/run python -m tests.mutants mutants.sqlite       # keeps a sample, seed 0
    scripts/run cosmic-ray exec cosmic-ray.toml mutants.sqlite     # 1 to 2 hours
    scripts/run cr-report --surviving-only --show-diff mutants.sqlite

In a checkout of its own: `exec` writes each mutant into the tree, and runs this module
without a database, which finds the changed file and runs its mirrored tests alone.
"""

import pathlib
import random
import sqlite3
import subprocess
import sys

SEED = 0
SAMPLE = {
    "nebula_jax/communication/wire/": 40,
    "nebula_jax/security/": 40,
    "nebula_jax/data/": 40,
    "nebula_jax/training/": 20,
    "nebula_jax/parallel/": 20,
}
"""Mutants that are tried, of each folder."""


def keep_sample(database: pathlib.Path) -> None:
    """Removes the mutants that a filter skips, and those that are not drawn."""
    with sqlite3.connect(database) as connection:
        rows = connection.execute(
            "SELECT module_path, operator_name, occurrence, job_id FROM mutation_specs"
            " WHERE job_id NOT IN (SELECT job_id FROM work_results)"
        ).fetchall()
        connection.execute("CREATE TEMP TABLE kept (job_id)")
        for folder, count in SAMPLE.items():
            # Sorted by content: a job's id is drawn anew by each `init`.
            of_folder = sorted(row for row in rows if row[0].startswith(folder))
            drawn = random.Random(SEED).sample(of_folder, count)
            connection.executemany(
                "INSERT INTO kept VALUES (?)", [row[-1:] for row in drawn]
            )
        for table in ("mutation_specs", "work_results", "work_items"):
            connection.execute(
                f"DELETE FROM {table} WHERE job_id NOT IN (SELECT job_id FROM kept)"
            )


def mirrored(module: pathlib.PurePath) -> list[str]:
    """Returns the test files of a module, or the folder where its tests would be."""
    folder = pathlib.Path("tests", *module.parts[1:-1])
    name = module.parent.name if module.stem == "__init__" else module.stem
    return [str(path) for path in sorted(folder.glob(f"test_{name}*.py"))] or [
        str(folder)
    ]


def run_tests() -> int:
    """Runs the mirrored tests of the modules that git calls changed."""
    changed = subprocess.run(
        ["git", "diff", "--name-only", "--", "nebula_jax"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    paths = [test for path in changed for test in mirrored(pathlib.PurePath(path))]
    alone = ["-n0", "-o", "addopts=--import-mode=importlib", "-m", "not slow"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", *alone, *paths]
    ).returncode


if __name__ == "__main__":
    if len(sys.argv) > 1:
        keep_sample(pathlib.Path(sys.argv[1]))
    else:
        sys.exit(run_tests())
