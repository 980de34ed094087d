"""What there is: `python -m benchmarks`."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.times import SUBJECTS


def main() -> None:
    for path in sorted(Path(__file__).parent.glob("*.py")):
        document = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = document.partition("\n\n")[0].replace("\n", " ")
        if f"python -m benchmarks.{path.stem}" in document:
            print(f"{path.stem:10} {first}")
    for name, subject in sorted(SUBJECTS.items()):
        print(f"times {name:20} {(subject.tables.__doc__ or '').splitlines()[0]}")


if __name__ == "__main__":
    main()
