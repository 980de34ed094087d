"""The files of a run: they are never written by halves, and a lock keeps a second run away from them."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["FileError", "locked", "replace", "unwritable"]

LOCK = ".lock"


class FileError(Exception):
    """A file of a run is damaged, in use, or cannot be read or written.

    The message is one line: the file, what is wrong with it, and what to do.
    """


def unwritable(path: Path, error: OSError) -> FileError:
    """What to say of a file or folder that could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "make room on the disk" if full else "make it writable"
    reason = error.strerror or type(error).__name__
    return FileError(f"{path}: cannot be written ({reason}); {advice}, and the same command continues")


def replace(path: Path, content: bytes) -> None:
    """Write another file and move it into place, so that a stop or a full disk never leaves half a file.

    Raises:
        FileError: the file cannot be written. The old one is unchanged.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a file system may report only here that it is full
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise unwritable(path, error) from None


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold the lock of this folder.

    It is a lock of the operating system on a file in the folder, which stays there. The system releases it
    when the process ends, however it ends.

    Raises:
        FileError: another process holds it.
        OSError: the file cannot be written.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(folder / LOCK, timeout=0))
        except Timeout:
            told = f"{folder}: in use by another run; wait until it ends, or give another --out"
            raise FileError(told) from None
        yield
