"""The machinery of `python -m reproduce`: what an experiment is, how it is run, and how it is reported."""
