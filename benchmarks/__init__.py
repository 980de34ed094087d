"""Benchmarks of khot. Their clocks are those of the runtime experiment."""

from khot.experiments.harness import timing as timing
