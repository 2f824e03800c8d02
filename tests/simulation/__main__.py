"""Simulates many runs, or one with all that happens in it; see the package."""

import argparse
import os
import pathlib
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from nebula_jax.runtime.records import report
from tests.simulation import bugs, faults, shrink, simulate, world


def main() -> int:
    """Simulates what the flags choose; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=2000, help="Number of runs.")
    parser.add_argument("--first", type=int, default=0, help="Seed of the first run.")
    parser.add_argument("--seed", type=int, help="Seed of one run, shown as it goes.")
    parser.add_argument("--out", help="JSON file for a record, with planted bugs.")
    flags = parser.parse_args()
    if flags.seed is not None:
        return replay(faults.draw(flags.seed))
    events, begin, start = 0, time.monotonic(), time.process_time()
    for seed in range(flags.first, flags.first + flags.seeds):
        try:
            events += shrink.check(faults.draw(seed)).world.events
        except world.Violation as error:
            print(error)
            return 1
    seconds = time.process_time() - start
    print(
        f"{flags.seeds} runs, {events} events, {seconds:.1f} s of CPU:"
        f" {60 * flags.seeds / seconds:.0f} runs a minute"
    )
    if flags.out:
        record = {
            "runs": flags.seeds,
            "first": flags.first,
            "events": events,
            "cpu_seconds": seconds,
            "bugs": {name: shrink.first_seed(bug) for name, bug in bugs.BUGS.items()},
        }
        record = report.provenance(time.monotonic() - begin) | record
        report.write(pathlib.Path(flags.out), record)
    return 0


def replay(scenario: faults.Scenario) -> int:
    """Simulates one run and prints what happens; if it fails, a shorter one."""
    print(shrink.describe(scenario))
    simulation = simulate.Simulation(scenario)
    try:
        simulation.run()
    except world.Violation as error:
        print(*simulation.world.log, f"broken: {error}", sep="\n")
        shortest, found = shrink.shrink(scenario, error)
        print(f"\nshorter: {found}\n{shrink.describe(shortest)}")
        return 1
    print(*simulation.world.log, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
