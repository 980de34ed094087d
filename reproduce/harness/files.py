"""The files of a run: they are never written by halves, and a lock keeps a second run away from them."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

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

    It is a lock of the operating system on a file in the folder. The system releases it when the process
    ends, however it ends, so that a file left behind by a killed process locks nothing.

    Raises:
        FileError: another process holds it.
        OSError: the file cannot be written.
    """
    path = folder / LOCK
    file = _acquire(path, folder)
    try:
        yield
    finally:
        if sys.platform == "win32":  # an open file cannot be removed there
            os.close(file)
        with suppress(OSError):  # another run has opened it already, or may not remove it
            path.unlink()
        if sys.platform != "win32":  # removed before it is released: nobody can lock it in between
            os.close(file)


def _acquire(path: Path, folder: Path) -> int:
    """The descriptor of the locked file."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if sys.platform == "win32":
                msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                os.close(file)
                raise FileError(
                    f"{folder}: in use by another run; wait until it ends, or give another --out"
                ) from None
            print(
                f"reproduce: {folder}: its file system has no locks; start no second run there",
                file=sys.stderr,
            )
            return file
        # the run before this one may have removed the file between the two calls
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        os.close(file)
