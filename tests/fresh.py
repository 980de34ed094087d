"""Programs in processes that have imported torch, and nothing of ours.

An import of torch takes seconds. On Linux one process does it for all programs, and forks for each.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = """
import json, os, signal, sys
import torch
while request := sys.stdin.readline():
    program, sys.argv, folder, environment, *files = json.loads(request)
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
signal.alarm(120)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
for place, path in enumerate(files, 1):
    os.dup2(os.open(path, os.O_WRONLY), place)
exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Of this process; its children have one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", SERVER], env=environment, **pipes)  # type: ignore[call-overload]
    atexit.register(server.communicate)
    return server


def run(
    program: str, *arguments: str | Path, cwd: Path | str = ".", **environment: str
) -> subprocess.CompletedProcess[str]:
    """What `python -c PROGRAM ARGUMENTS` does in this environment, with changes."""
    words, told = ["-c", *map(str, arguments)], {**os.environ, **environment}
    if sys.platform != "linux":
        command = [sys.executable, "-c", program, *words[1:]]
        return subprocess.run(command, cwd=cwd, env=told, capture_output=True, text=True, timeout=120)
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "out", Path(folder) / "err"]
        for file in files:
            file.touch()
        request = (program, words, str(Path(cwd).resolve()), told, *map(str, files))
        print(json.dumps(request), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, *(file.read_text() for file in files))
