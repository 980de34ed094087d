"""The `khot` command, its demo, and the experiments of the papers.

- `harness/` is the machinery: the command line, what an experiment is, how its trials are run, data and
  timing;
- `papers/` has one file per experiment;
- `tasks/` has what several experiments, benchmarks or examples share: generated data, and methods to compare
  with;
- `demo.py` is `khot demo`.
"""
