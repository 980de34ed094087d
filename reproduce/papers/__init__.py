"""The papers' experiments, one module per experiment.

Every module in this folder is an experiment: `python -m reproduce` finds it here, and its name with hyphens
instead of underscores is the experiment's name. :class:`reproduce.harness.study.Experiment` says what
a module has to define.
"""
