"""`python -m khot`: the same as the `khot` command."""

from khot.experiments.cli import main

if __name__ == "__main__":
    main()
