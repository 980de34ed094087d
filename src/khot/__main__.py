"""`python -m khot` is the same as the `khot` command."""

from khot.experiments.harness.entry import main

if __name__ == "__main__":
    main()
