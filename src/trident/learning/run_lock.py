"""One process at a time writes a run; with torchrun, the first process takes the lock for all.

The system releases the lock when its process ends, also by kill -9; the file `.lock` only says whose it is.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trident.distributed.processes import Processes
from trident.errors import TridentError, os_errors

LOCK = ".lock"
_held: set[Path] = set()  # folders of this process, which is not kept out by its own locks


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold a run's folder, which must exist. It is an error if another process holds it."""
    folder = run.resolve()
    if folder in _held:
        yield
        return
    with os_errors(f"cannot write {run / LOCK}"):
        file = _locked(folder / LOCK, run)
    _held.add(folder)
    try:
        yield
    finally:
        _held.discard(folder)
        with suppress(OSError):
            (folder / LOCK).unlink(missing_ok=True)  # before the lock is released by closing the file
        with suppress(OSError):
            file.close()


def _locked(path: Path, run: Path) -> BinaryIO:
    while True:
        file = path.open("a+b")
        try:
            # Unlike flock, lockf is not inherited by child processes, which may live longer than this one.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            with file:
                file.seek(0)
                holder = file.read(200).decode("utf-8", "replace").strip() or "another process"
            raise TridentError(f"{holder} is training {run}: wait for it, stop it, or choose another folder") from None
        except OSError:
            pass  # some file systems have no locks
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            break
        file.close()  # the process that held it has deleted it in between
    with suppress(OSError):  # on a full disk it holds without a name
        os.truncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
    return file


@contextmanager
def held_by_first(run: Path, processes: Processes) -> Iterator[None]:
    """Hold the lock on several processes: the first one has it. If it cannot, all raise its error."""
    with ExitStack() as held:
        processes.from_first(lambda: held.enter_context(run_lock(run)))
        yield
