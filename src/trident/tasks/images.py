"""The images of a store on a device: copied there as a whole, or gathered from host memory for each batch."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trident.data.store import PLACES, ImageStore
from trident.errors import TridentError
from trident.tasks.task import Batch, tensors_of

KEPT_FREE = 1 / 3  # of a GPU's memory, for training
COPIED_AT_ONCE = 4096  # images
READING_THREADS = 4  # several wait for the disk and compute checksums at the same time
_on_device: dict[tuple[str, torch.device, str], Tensor | None] = {}  # None: it did not fit when it was first used


class Images:
    """The images of a store, by position, on a device.

    On a GPU the whole store is copied there, once for training and validation, unless it does not fit. Then it stays
    where it is, in memory or memory-mapped on disk, and `gathers` is true: `at` collects the images in pinned memory
    and copies them asynchronously. On a CPU the store is used where it is. `store.keep_on` decides otherwise.
    """

    def __init__(self, store: ImageStore, device: torch.device | str):
        if store.keep_on not in PLACES:
            raise TridentError(f"a store cannot be kept on '{store.keep_on}': it can be {', '.join(PLACES)}")
        self.store = store
        self.device = torch.device(device)
        self._resident = None
        if self.device.type != "cpu" and store.keep_on != "host":
            self._resident = _resident(store, self.device)
        self.gathers = store.keep_on == "host" or (self.device.type != "cpu" and self._resident is None)

    def at(self, positions: np.ndarray) -> Tensor:
        """(...) -> (..., height, width, channel) uint8, or (..., feature) float32."""
        if self._resident is not None:
            return self._resident[torch.from_numpy(positions).to(self.device)]
        if self.gathers:
            return self._gathered(positions)
        self.store.check(positions)
        return torch.from_numpy(self.store.images[positions])

    def on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    @cached_property
    def background(self) -> "Background":
        return Background(self.device)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(READING_THREADS)

    def _gathered(self, positions: np.ndarray) -> Tensor:
        images, flat = np.asarray(self.store.images), positions.reshape(-1)
        pinned = self.device.type == "cuda"
        gathered = torch.empty((len(flat), *images.shape[1:]), dtype=_type_of(images), pin_memory=pinned)
        rows, per_thread = gathered.numpy(), -(-len(flat) // READING_THREADS)

        def gather(start: int) -> None:
            part = slice(start, start + per_thread)
            self.store.check(flat[part])
            np.take(images, flat[part], 0, rows[part], mode="clip")  # other modes copy twice

        list(self._threads.map(gather, range(0, len(flat), per_thread)))
        return gathered.reshape(*positions.shape, *images.shape[1:]).to(self.device, non_blocking=pinned)


class Background:
    """One thread that draws batches; on a GPU with a stream of its own, so that copies do not wait for computations."""

    def __init__(self, device: torch.device):
        self.thread = ThreadPoolExecutor(1)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(self, draw: Callable[[], Batch]) -> Callable[[], Batch]:
        """Start to draw a batch. The function that is returned waits for it."""
        if self.stream is None:
            return self.thread.submit(draw).result
        stream = self.stream

        def drawn() -> tuple[Batch, torch.cuda.Event]:
            with torch.cuda.stream(stream):
                return draw(), stream.record_event()

        future = self.thread.submit(drawn)

        def ready() -> Batch:
            batch, copied = future.result()
            current = torch.cuda.current_stream(stream.device)
            current.wait_event(copied)
            for tensor in tensors_of(batch):
                tensor.record_stream(current)  # its memory must not be used again before the computation is done
            return batch

        return ready


def _resident(store: ImageStore, device: torch.device) -> Tensor | None:
    """The whole store on a GPU, or None if it does not fit there and need not be there."""
    key = (store.fingerprint, device, store.keep_on)
    if key not in _on_device:
        _on_device.clear()
        if store.keep_on == "auto" and not _fits(store, device):
            _on_device[key] = None
            return None
        whole = torch.empty(store.images.shape, dtype=_type_of(store.images), device=device)
        parts = [slice(start, start + COPIED_AT_ONCE) for start in range(0, len(whole), COPIED_AT_ONCE)]
        with ThreadPoolExecutor(READING_THREADS) as threads:
            positions = np.arange(len(whole))
            checked = threads.map(lambda part: store.check(positions[part]), parts)
            for part in parts:
                whole[part] = torch.from_numpy(np.array(store.images[part])).to(device)
            list(checked)  # raises if an image is damaged
        _on_device[key] = whole
    return _on_device[key]


def _fits(store: ImageStore, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch would use it again
    return bool(store.images.nbytes <= free + unused - KEPT_FREE * total)


def _type_of(images: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, images.dtype)).dtype
