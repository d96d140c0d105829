"""Decodes untrusted pictures in processes of their own, which have limits on time and memory.

A small file can take minutes or gigabytes to decode, and a fault in a decoder can end the process. Then only this
picture has an error, and the next one gets a new process. Processes are kept for more pictures.

A process gets a pickled `_Job` and the bytes of the picture's file. What it answers is not pickled, because a picture
may have taken it over: the kind (a byte), a length, and pixels or a text. Before it decodes a large picture it answers
with the number of pixels, and waits until the other processes leave room for them.
"""

import atexit
import ctypes
import math
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from trident.data.images import (
    MOST_PIXELS,
    DatasetImage,
    ImageFile,
    ImageInMemory,
    ImageSource,
    Target,
    UnreadableImageError,
    in_memory,
    open_image,
    silence_pillow,
)
from trident.errors import ResumableError, TridentError

# Limits grow with the pixels of the picture. What honest ones need, on a slow core: 0.09 microseconds for a pixel of a
# transparent PNG, and five copies with 4 bytes each while such a picture is turned and made opaque.
_SECONDS, _SECONDS_PER_PIXEL = 2.0, 0.15e-6  # of processor time
_BYTES, _BYTES_PER_PIXEL = 2**27, 24
_SMALL = 2**20  # pixels; larger pictures wait until all that are being decoded have at most MOST_PIXELS in total
_WALL = 15  # times as long it may take if other programs need the processor, or the disk is slow

_PROGRAM = "from trident.data.decoding_process import serve; serve()"
_PIXELS, _ERROR, _LARGE = 0, 1, 2
_HEAD = struct.Struct("<BI")
_LENGTH = struct.Struct("<Q")
_LONGEST_TEXT = 2000
_PIPE_BYTES = 2**18  # pixels fit in at once: otherwise the two processes wait for each other (Linux only)


class TooSlowError(UnreadableImageError):
    """A picture that took more than the allowed processor time."""


class KilledError(UnreadableImageError):
    """A picture whose process was killed from outside, twice: as a system does that has no memory left."""


class _EndedError(Exception):
    """The process ended before it answered."""

    def __init__(self, code: int):
        self.killed = code == -signal.SIGKILL
        how = signal.Signals(-code).name if -code in {*signal.Signals} else f"status {code}"
        super().__init__(f"the process that decoded it ended ({how})")


@dataclass(frozen=True)
class _Job:
    size: int  # of the picture's file, in bytes
    target: Target
    seconds: float  # at most


class _Room:
    """The pixels that all processes together may decode at a time. A picture that does not fit waits for others."""

    def __init__(self) -> None:
        self._changed, self._next = threading.Condition(), threading.Lock()
        self._free = MOST_PIXELS

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        pixels = min(pixels, MOST_PIXELS)
        with self._next if pixels else nullcontext(), self._changed:  # the next one waits, and later ones behind it
            self._changed.wait_for(lambda: self._free >= pixels)
            self._free -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._free += pixels
                self._changed.notify_all()


class DecodingProcesses:
    """Decodes a picture in each thread that asks, with a process for each. Processes that are free are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room = _Room()
        self._free: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False

    def decode(self, source: ImageSource, target: Target, seconds: float = math.inf) -> np.ndarray:
        """Like `target.decode`, but with limits on memory and on processor time, which is at most `seconds`."""
        seconds = min(seconds, _seconds(target.pixels))
        content = in_memory(source).held
        if not isinstance(content, bytes):  # it is pixels already
            return target.decode(ImageInMemory(source.name, content))
        job = _Job(len(content), target, seconds)
        with suppress(_EndedError):  # perhaps not because of the picture: the system may have no memory left
            return self._decoded(source.name, job, content)
        try:
            return self._decoded(source.name, job, content)
        except _EndedError as error:
            kind = KilledError if error.killed else UnreadableImageError
            raise kind(f"{source.name}: {error}") from error

    def start(self, n: int = 1) -> None:
        """Start processes that will be needed, without waiting for them."""
        with self._lock:
            self._free += [_Process() for _ in range(n - len(self._free) - len(self._busy))]

    def close(self) -> None:
        """End all processes. Pictures that are being decoded get an error."""
        with self._lock:
            self._closed = True
            for process in self._busy:
                process.process.kill()  # while another thread waits for its answer
            for process in self._free:
                process.kill()
            self._free.clear()

    def _decoded(self, name: str, job: _Job, content: bytes) -> np.ndarray:
        with self._process() as process:
            return process.decoded(name, job, content, self._room)

    @contextmanager
    def _process(self) -> "Iterator[_Process]":
        with self._lock:
            if self._closed:
                raise TridentError("the processes that decode pictures have been stopped")
            process = self._free.pop() if self._free else _Process()
            self._busy.add(process)
        try:
            yield process
        except UnreadableImageError:  # a whole answer
            raise
        except BaseException:  # also Ctrl-C: what it would answer belongs to this picture
            process.kill()
            raise
        finally:
            with self._lock:
                self._busy.discard(process)
                if process.alive and not self._closed:
                    self._free.append(process)


class _Process:
    """One process, seen from outside. `alive` means that it can take another picture."""

    def __init__(self) -> None:
        # Not multiprocessing, which would import the user's script once more.
        program = f"import sys; sys.path[:] = {sys.path!r}; {_PROGRAM}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            bufsize=0,
            pipesize=_PIPE_BYTES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process alone; the other ends when its pipe is closed
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self.alive = True

    def decoded(self, name: str, job: _Job, content: bytes, room: _Room) -> np.ndarray:
        """The pixels. An UnreadableImageError says why there are none."""
        sent, output = self.process.stdin, self.process.stdout
        assert sent is not None and output is not None
        try:
            pickled = pickle.dumps(job)
            for part in (_LENGTH.pack(len(pickled)), pickled, content):
                _write_all(sent, part)
            kind, length = _HEAD.unpack(_read_all(output, _HEAD.size, _WALL * job.seconds))
            with room.taken(length if kind == _LARGE else 0):
                if kind == _LARGE:
                    _write_all(sent, b"\0")
                    kind, length = _HEAD.unpack(_read_all(output, _HEAD.size, _WALL * job.seconds))
                shape = (job.target.size, job.target.size, job.target.channels)
                if kind == _PIXELS and length == np.prod(shape):
                    return np.frombuffer(_read_all(output, length), np.uint8).reshape(shape)
                if kind != _ERROR or length > _LONGEST_TEXT:
                    self.kill()
                    raise UnreadableImageError(f"{name}: the process that decoded it gave no sensible answer")
                reason = " ".join(_read_all(output, length).decode("utf-8", "replace").split())
                raise UnreadableImageError(f"{name}: {reason}")
        except (BrokenPipeError, EOFError, TimeoutError) as error:
            self.kill()
            if isinstance(error, TimeoutError) or self.process.returncode == -signal.SIGPROF:
                raise TooSlowError(f"{name}: it took too long to decode: save it again, or smaller") from error
            raise _EndedError(self.process.returncode) from error

    def kill(self) -> None:
        self.alive = False
        with suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0.2)  # one that has ended tells why; one that is free ends now
        self.process.kill()
        self.process.wait()


def _write_all(pipe: IO[bytes], content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[pipe.write(rest) :]


def _read_all(pipe: IO[bytes], n: int, seconds: float = math.inf) -> bytearray:
    """The next n bytes. A TimeoutError if none comes for so many seconds."""
    coming = select.poll()
    coming.register(pipe, select.POLLIN)
    if seconds < math.inf and not coming.poll(1000 * seconds):
        raise TimeoutError
    content = bytearray(n)
    done = 0
    while done < n:
        got = pipe.readinto(memoryview(content)[done:])  # type: ignore[attr-defined]
        if not got:
            raise EOFError
        done += got
    return content


# In the other process


def serve() -> None:
    """Answer until the pipe is closed. Each picture has its limits."""
    silence_pillow()
    taken, given = os.fdopen(0, "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # a decoder that prints does not disturb the answers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own = _address_space()
    while True:
        try:
            job: _Job = pickle.loads(_read_all(taken, _LENGTH.unpack(_read_all(taken, _LENGTH.size))[0]))
        except EOFError:
            os._exit(0)
        kind, answer = _answer(job, own, taken, given)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if own is not None and (_address_space() or 0) > own + 2 * _BYTES:
            with suppress(AttributeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)  # what a large picture took would stay with this process
        _write_all(given, _HEAD.pack(kind, len(answer)) + answer)


def _answer(job: _Job, own: int | None, taken: IO[bytes], given: IO[bytes]) -> tuple[int, bytes]:
    """Decode the picture of a job. This process gets limits that fit its size; it has `own` bytes anyway."""

    def limit(pixels: int) -> None:
        # The timer's signal ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, min(job.seconds, _seconds(pixels)))
        if own is not None:
            most = own + 2 * job.size + _BYTES + _BYTES_PER_PIXEL * pixels
            with suppress(ValueError):  # the user's own limit is lower
                resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def opened() -> Image.Image:
        limit(0)
        image = open_image(bytes(_read_all(taken, job.size)))
        pixels = image.width * image.height
        if _SMALL < pixels <= job.target.pixels:
            _write_all(given, _HEAD.pack(_LARGE, pixels))
            _read_all(taken, 1)  # comes when there is room
        limit(pixels)
        return image

    try:
        return _PIXELS, job.target.decode_opened("", opened).tobytes()
    except UnreadableImageError as error:
        return _ERROR, str(error).removeprefix(": ").encode("utf-8", "replace")[:_LONGEST_TEXT]


def _seconds(pixels: int) -> float:
    return _SECONDS + _SECONDS_PER_PIXEL * pixels


def _address_space() -> int | None:
    """In bytes, of this process; None where the system does not tell, and then it is not limited."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else None


decoders = DecodingProcesses()  # all that one command needs
atexit.register(decoders.close)
os.register_at_fork(after_in_child=decoders.__init__)  # type: ignore[misc]  # its processes belong to the parent


# Many images, in order, with few of them in memory

_BATCH_BYTES = 2**20  # of decoded images that a process is given at once
_MOST_IN_A_BATCH = 64
_BATCHES_IN_FLIGHT = 3  # for each process

Decoded = np.ndarray | UnreadableImageError


def available_cores() -> int:
    """The number of cores that this process may use, or of all cores if the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decoded(sources: Sequence[DatasetImage], target: Target, workers: int) -> Iterator[Decoded]:
    """Each image's pixels, or why it cannot be read, in the order of the sources."""
    image_bytes = target.size**2 * target.channels
    at_once = max(1, min(_MOST_IN_A_BATCH, _BATCH_BYTES // image_bytes))
    batches = [sources[start : start + at_once] for start in range(0, len(sources), at_once)]
    if min(workers, len(batches)) <= 1:
        for source in sources:
            yield _decoded(decoders, source, target)
        return
    processes = DecodingProcesses()
    threads = ThreadPoolExecutor(min(workers, len(batches)))  # each waits for a process of its own
    waiting: deque[Future[list[Decoded]]] = deque()

    def decode_batch(batch: list[ImageSource | UnreadableImageError]) -> list[Decoded]:
        return [one if isinstance(one, UnreadableImageError) else _decoded(processes, one, target) for one in batch]

    try:
        for batch in batches:
            if len(waiting) >= _BATCHES_IN_FLIGHT * workers:
                yield from waiting.popleft().result()
            waiting.append(threads.submit(decode_batch, [_portable(source) for source in batch]))
        while waiting:
            yield from waiting.popleft().result()
    finally:
        processes.close()  # on an error or Ctrl-C they do not finish their batches
        threads.shutdown(cancel_futures=True)


def _portable(source: DatasetImage) -> ImageSource | UnreadableImageError:
    """What another thread can read. Pickles and zip files are read in this one only; a file waits for its turn."""
    try:
        return source if isinstance(source, ImageFile) else in_memory(source)
    except UnreadableImageError as error:
        return error


def _decoded(processes: DecodingProcesses, source: ImageSource, target: Target) -> Decoded:
    try:
        return processes.decode(source, target)
    except KilledError as error:
        raise ResumableError("a process that decoded images was killed, perhaps because memory ran out") from error
    except UnreadableImageError as error:
        return error
