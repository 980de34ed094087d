"""Where the `khot` command starts. The package takes seconds to import, and Ctrl-C
has to be quiet then, too."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """The entry point of the console script."""
    try:
        from khot.experiments.harness import entry

        entry.main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # what shells report for a command that Ctrl-C ended
