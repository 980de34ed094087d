"""Runs the notebooks, and stores what their cells give: `python docs/build/notebooks.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat

__all__ = ["NOTEBOOKS", "executed"]

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


def executed(path: Path) -> Any:
    """The notebook with the outputs that its cells have now, and without times."""
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3", record_timing=False).execute()
    book.metadata["language_info"] = {"name": "python"}
    return book


def main() -> None:
    for path in NOTEBOOKS:
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
