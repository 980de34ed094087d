"""The papers' experiments, with our figures beside theirs: `python -m reproduce list`, from a checkout.

- `harness/` is the machinery: the command line, what an experiment is, how its trials are run, data and
  timing;
- `papers/` has one file per experiment;
- `tasks/` has what several experiments, benchmarks or examples share: generated data, and methods to compare
  with.
"""
