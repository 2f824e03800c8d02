"""Simulates many runs, or one with all that happens in it.

python -m tests.simulation --seeds=100000      # until one breaks a promise
python -m tests.simulation --seed=4711         # what happens in one
"""

import argparse
import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.simulation import faults, shrink, simulate, world


def main() -> int:
    """Simulates what the flags choose; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2000, help="How many seeds.")
    parser.add_argument("--first", type=int, default=0, help="The first seed.")
    parser.add_argument("--seed", type=int, help="One seed, with all that happens.")
    flags = parser.parse_args()
    if flags.seed is not None:
        return replay(faults.draw(flags.seed))
    events, start = 0, time.process_time()
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
