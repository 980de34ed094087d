"""Runs `python -m reproduce` in this process, so that a test can replace parts of it."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from reproduce.harness import cli


class Run(NamedTuple):
    """What a command left."""

    exit_code: int
    stdout: str
    stderr: str


def invoke(*words: str | Path, data_dir: Path | None = None) -> Run:
    """The command with these arguments, where KHOT_DATA_DIR is that folder or is not set."""
    out, err = io.StringIO(), io.StringIO()
    environment = {key: value for key, value in os.environ.items() if key != "KHOT_DATA_DIR"}
    if data_dir is not None:
        environment["KHOT_DATA_DIR"] = str(data_dir)
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:
            code = int(end.code or 0)
    return Run(code, out.getvalue(), err.getvalue())
