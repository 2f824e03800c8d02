"""The parts of the benchmarks."""
