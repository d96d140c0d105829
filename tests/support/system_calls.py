"""Watches the file-system calls of a process: kills it at one, lets one fail, or makes one wait.

Linux hands each such call to this process before it is carried out (seccomp with user notification), also those of
libraries written in C, of threads and of child processes. It needs no rights and no compiler. The process that watches
must have one thread only, since it forks.
"""

import ctypes
import errno
import os
import platform
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path
from typing import NamedTuple

# Numbers of system calls, and what is needed of them: where the path is, or the file's number. Newer machines have only
# those with "at", whose paths may be relative to a folder.
_NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "openat": 257, "mkdir": 83, "mkdirat": 258, "rename": 82, "renameat": 264, "renameat2": 316, "unlink": 87,
        "unlinkat": 263, "rmdir": 84, "link": 86, "linkat": 265, "truncate": 76, "ftruncate": 77, "fsync": 74,
        "fdatasync": 75, "write": 1, "pwrite64": 18, "writev": 20, "sendfile": 40, "copy_file_range": 326,
        "fchmod": 91, "chmod": 90, "fchmodat": 268, "utimensat": 280, "flock": 73, "fcntl": 72, "read": 0,
        "pread64": 17, "stat": 4, "lstat": 6, "newfstatat": 262, "statx": 332, "getdents64": 217, "seccomp": 317,
    },
    "aarch64": {
        "openat": 56, "mkdirat": 34, "renameat": 38, "renameat2": 276, "unlinkat": 35, "linkat": 37, "truncate": 45,
        "ftruncate": 46, "fsync": 82, "fdatasync": 83, "write": 64, "pwrite64": 68, "writev": 66, "sendfile": 71,
        "copy_file_range": 285, "fchmod": 52, "fchmodat": 53, "utimensat": 88, "flock": 32, "fcntl": 25, "read": 63,
        "pread64": 67, "newfstatat": 79, "statx": 291, "getdents64": 61, "seccomp": 277,
    },
}  # fmt: skip
_CALLS = _NUMBERS.get(platform.machine(), {})
_NAMES = {number: name for name, number in _CALLS.items()}
_AT = {"openat": 0, "mkdirat": 0, "unlinkat": 0, "fchmodat": 0, "newfstatat": 0, "statx": 0, "utimensat": 0}
_AT |= {"renameat": 2, "renameat2": 2, "linkat": 2}  # two paths: the second is the new one
_PLAIN = {"mkdir": 0, "unlink": 0, "rmdir": 0, "truncate": 0, "chmod": 0, "stat": 0, "lstat": 0}
_PLAIN |= {"rename": 1, "link": 1}
_LINKS, _LOCKS = ("link", "linkat"), ("flock", "fcntl")
CHANGES: tuple[str, ...] = (
    "openat",
    "mkdir",
    "mkdirat",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "rmdir",
    *_LINKS,
)
CHANGES += ("truncate", "ftruncate", "fsync", "fdatasync", "write", "pwrite64", "writev", "sendfile", "copy_file_range")
READS = ("openat", "read", "pread64", "stat", "lstat", "newfstatat", "statx", "getdents64", "sendfile")
_LOCKING = (6, 7, 37, 38)  # commands of fcntl
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
available = sys.platform == "linux" and bool(_CALLS)


class Call(NamedTuple):
    """A system call that is about to be made on a file of the watched folder."""

    name: str
    path: Path
    other: Path | None  # the old name, if the call has two

    def __str__(self) -> str:
        return f"{self.name} {'temporary' if self.path.suffix in ('.part', '.link') else self.path.name}"


class Kill(Exception):
    """Raised by a rule: the process is killed before the call is made."""


class LostReply(Exception):
    """Raised by a rule: the call is made, and the process is told that it failed, as a network disk may do."""


class Wait(Exception):
    """Raised by a rule: the call waits until all other processes have ended, or cannot go on."""


class Disk(NamedTuple):
    """What a file system can do."""

    links: bool = True
    locks: bool = True

    def __str__(self) -> str:
        return {Disk(): "", Disk(links=False): " without links"}.get(self, " without links and locks")


Rule = Callable[[int, Call], int]  # the number of the call, from 1; returns 0, or the number of an error that it gets


def go_on(number: int, call: Call) -> int:
    return 0


@dataclass
class Process:
    """A process in which some work is done, and its calls."""

    work: Callable[[], object]
    folder: Path
    names: Sequence[str] = CHANGES
    rule: Rule = go_on
    disk: Disk = Disk()
    calls: list[Call] = field(default_factory=list)
    code: int | None = None  # of the end, negative for a signal
    output: str = ""
    errors: str = ""


class _Running:
    def __init__(self, process: Process):
        self.process = process
        self.folder = process.folder.resolve()
        self.files = [os.memfd_create("output"), os.memfd_create("errors")]
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._child(theirs)
        theirs.close()
        with ours:
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        if not fds:
            raise RuntimeError("this system does not let system calls be watched")
        self.listener = fds[0]
        self.end = os.pidfd_open(self.pid)
        self.held: bytes | None = None  # the answer to a call that waits

    def _child(self, socket_: socket.socket) -> None:
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, file in enumerate(self.files, 1):
                os.dup2(file, number)
            names = {*self.process.names, *(() if self.process.disk.links else _LINKS)}
            names |= set() if self.process.disk.locks else {*_LOCKS}
            listener = _filtered([_CALLS[name] for name in sorted(names) if name in _CALLS])
            socket.send_fds(socket_, [b"x"], [listener])
            os.close(listener)
            socket_.close()
            self.process.work()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(code)

    def answer(self) -> None:
        """Take one call and answer it, unless it waits."""
        content = bytearray(80)
        try:
            ioctl(self.listener, _RECEIVE, content)
        except OSError:  # it was killed in between
            return
        identity, pid, _, number, _, _, *arguments = struct.unpack("=QIIiIQ6Q", content)
        go = struct.pack("=QqiI", identity, 0, 0, _CONTINUE)
        process, name = self.process, _NAMES[number]
        if name in _LOCKS:
            locks = name == "flock" or arguments[1] & 0xFFFFFFFF in _LOCKING
            self._send(struct.pack("=QqiI", identity, 0, -errno.ENOLCK, 0) if locks else go)
            return
        call = self._call(pid, name, arguments)
        if call is None:
            self._send(go)
            return
        if name in _LINKS and not process.disk.links:
            self._send(struct.pack("=QqiI", identity, 0, -errno.EPERM, 0))
            return
        if name not in process.names:
            self._send(go)
            return
        process.calls.append(call)
        try:
            error = process.rule(len(process.calls), call)
            self._send(struct.pack("=QqiI", identity, 0, -error, 0) if error else go)
        except Kill:
            os.kill(self.pid, signal.SIGKILL)
        except LostReply:
            self._send(struct.pack("=QqiI", identity, 0, -_made_twice(call), 0))
        except Wait:
            self.held = go

    def release(self) -> None:
        if self.held is not None:
            self._send(self.held)
            self.held = None

    def _send(self, answer: bytes) -> None:
        with suppress(OSError):
            ioctl(self.listener, _SEND, answer)

    def _call(self, pid: int, name: str, arguments: list[int]) -> Call | None:
        """None if it is on another file, or does not change one that should be changed."""
        try:
            if name in _AT or name in _PLAIN:
                if name == "openat" and self.process.names is CHANGES and not arguments[2] & _WRITING:
                    return None
                last = _AT.get(name, _PLAIN.get(name, 0))
                step = 2 if name in _AT else 1
                paths = [
                    _path(pid, arguments[place] if name in _AT else -100, arguments[place + step - 1])
                    for place in range(0, last + 1, step)
                ]
            else:
                paths = [Path(f"/proc/{pid}/fd/{arguments[0] & 0x7FFFFFFF}").readlink()]
        except OSError:
            return None
        if not paths[-1].is_relative_to(self.folder):
            return None
        return Call(name, paths[-1], paths[0] if len(paths) > 1 else None)

    def finish(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self.process.code = os.waitstatus_to_exitcode(status)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        texts = []
        for file in self.files:
            texts.append(os.pread(file, 10**6, 0).decode("utf-8", "replace"))
            os.close(file)
        self.process.output, self.process.errors = texts
        os.close(self.listener)
        os.close(self.end)


def run(*processes: Process, patience: float = 0.5, limit: float = 120) -> None:
    """Run processes until all have ended. The next one starts when those before it have ended or wait.

    One that waits goes on when all others have ended or wait too, or after `patience` seconds without a call of theirs.
    """
    waiting, running = [*processes], list[_Running]()
    stop, quiet = time.monotonic() + limit, time.monotonic()
    while running or waiting:
        if waiting and all(one.held is not None for one in running):
            running.append(_Running(waiting.pop(0)))
            quiet = time.monotonic()
        poll = select.poll()
        for one in running:
            poll.register(one.end, select.POLLIN)
            if one.held is None:
                poll.register(one.listener, select.POLLIN)
        ready = {number for number, events in poll.poll(50) if events & select.POLLIN}
        for one in list(running):
            if one.listener in ready:
                one.answer()
                quiet = time.monotonic()
            elif one.end in ready:
                running.remove(one)
                one.finish()
        held = [one for one in running if one.held is not None]
        if not waiting and held and (len(held) == len(running) or time.monotonic() - quiet > patience):
            for one in held:
                one.release()
            quiet = time.monotonic()
        if time.monotonic() > stop:
            for one in running:
                os.kill(one.pid, signal.SIGKILL)
            stop += 3600


def _made_twice(call: Call) -> int:
    """Make the call, and return the error that making it again gives."""
    try:
        if call.name.startswith("link") and call.other:
            os.link(call.other, call.path, follow_symlinks=False)
            return errno.EEXIST
        if call.name.startswith("rename") and call.other:
            os.rename(call.other, call.path)  # noqa: PTH104
            return errno.ENOENT
        if call.name.startswith("mkdir"):
            call.path.mkdir()
            return errno.EEXIST
        if call.name.startswith("unlink"):
            call.path.unlink()
            return errno.ENOENT
        return errno.ESTALE
    except OSError as error:
        return error.errno or errno.EIO


def _path(pid: int, folder: int, address: int) -> Path:
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        memory.seek(address)
        text = memory.read(4096 - address % 4096)
        if b"\0" not in text:
            text += memory.read(4096)
    number = folder - 2**32 if folder & 0xFFFFFFFF >= 2**31 and folder >= 0 else folder
    number = ctypes.c_int(number & 0xFFFFFFFF).value
    start = Path(f"/proc/{pid}/cwd" if number == -100 else f"/proc/{pid}/fd/{number}")
    return Path(os.path.normpath(start.readlink() / os.fsdecode(text.partition(b"\0")[0])))


def _filtered(numbers: list[int]) -> int:
    """From now on, these calls of this process ask first. Returns the file on which they ask."""
    load = [(0x20, 0, 0, 4), (0x15, 1, 0, _ARCHITECTURES[platform.machine()]), (0x06, 0, 0, _ALLOW), (0x20, 0, 0, 0)]
    jumps = [(0x15, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    lines = [*load, *jumps, (0x06, 0, 0, _ALLOW), (0x06, 0, 0, _NOTIFY)]
    content = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = struct.pack("@HP", len(lines), ctypes.addressof(content))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(38, 1, 0, 0, 0):  # no new privileges: so that no rights are needed
        raise OSError(ctypes.get_errno(), "prctl")
    listener = library.syscall(_CALLS["seccomp"], 1, 1 << 3, ctypes.create_string_buffer(program))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(listener)
