"""Benchmarks of khot. Their clocks are those of the runtime experiment."""

from reproduce.harness import timing as timing
