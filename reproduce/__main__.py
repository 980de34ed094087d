"""`python -m reproduce`."""

from __future__ import annotations

import importlib.util
import sys

from _khot import tidy

__all__: list[str] = []

# what the extra brings; some of it is imported only when hours of training are over
NEEDED = ("filelock", "matplotlib", "numpy", "rich", "sklearn")


def _main() -> int:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"reproduce: needs {', '.join(missing)}; pip install -e '.[reproduce]'", file=sys.stderr)
        return 1
    from reproduce.harness import cli

    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    with tidy("reproduce"):
        raise SystemExit(_main())
