"""The machinery behind the `khot` command: what an experiment is, how it is run, and how it is reported."""
