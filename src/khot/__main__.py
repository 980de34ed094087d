"""`python -m khot` is the same as the `khot` command."""

from _khot import main

if __name__ == "__main__":
    main()
