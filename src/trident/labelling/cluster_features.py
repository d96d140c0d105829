"""The features of pictures, computed on a Ray cluster.

The pile is cut into blocks. Ray Data deals them out to actors, each of which loads the backbone once, and sends a block
again if the node that had it is lost. An actor reads pictures by their paths, so the nodes must share a file system. It
returns features with the keys of the pictures' content. The cache stays with the command: no actor uses it.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from trident.allocator import keep_freed_memory
from trident.backbones.pretrained import BATCH, Pretrained, find_backbone
from trident.data.images import ImageSource, silence_pillow
from trident.errors import TridentError
from trident.labelling.feature_cache import FeatureCache
from trident.labelling.feature_labeller import FeatureLabeller
from trident.labelling.labelled import Labelled
from trident.labelling.picture_features import features_of, key_or_reason
from trident.progress import Progress
from trident.ray_cluster import connected, short_message

_LEAST, _MOST = 4 * BATCH, 64 * BATCH  # pictures of a block
_BLOCKS_FOR_EACH = 16  # actors get at least so many blocks one after the other, if the pile is large enough
_KEYS_AT_ONCE = 8192  # looked up in the cache at once

Row = dict[str, Any]  # of a dataset: one block of pictures, or what was found about it


def label_on_cluster(
    labeller: FeatureLabeller,
    pile: Sequence[ImageSource],
    cluster: str,
    say: Callable[[str], None],
    progress: Progress,
) -> Labelled:
    """Does what `labeller.label` does, with the features computed on a cluster."""
    with connected(cluster, say) as ray:
        dealt = _Pile(ray, labeller.backbone, pile, labeller.cache, progress)
        features, failures = dealt.features()
    return replace(labeller.label_computed(features, failures), keys=dealt.keys)


class _Pile:
    """The command's side: it cuts the pile into blocks and collects what comes back."""

    def __init__(
        self,
        ray: ModuleType,
        backbone: Pretrained,
        sources: Sequence[ImageSource],
        cache: FeatureCache | None,
        progress: Progress,
    ):
        self._ray, self._backbone, self._sources, self._cache = ray, backbone, sources, cache
        self._progress = progress
        self._found = np.zeros((len(sources), backbone.n_features), np.float32)
        self._failures: dict[int, str] = {}
        self.keys: dict[int, bytes] = {}
        self._done = 0

    def features(self) -> tuple[np.ndarray, dict[int, str]]:
        """The features and error messages, as `features_of` returns them."""
        missing = self._not_in_cache()
        self._report(len(self._sources) - len(missing))
        for places, row in self._mapped(missing, _FeatureActor, self._arguments):
            features = np.frombuffer(row["features"], np.float32).reshape(len(places), self._backbone.n_features)
            keys = self._keys(places, row)
            self._failures |= {places[int(at)]: why for at, why in json.loads(row["failures"]).items()}
            self._found[places] = features
            if self._cache is not None:
                good = {key: self._found[place] for place, key in keys.items() if place not in self._failures}
                self._cache.put(self._backbone.fingerprint, good)
            self._report(len(places))
        return self._found, dict(sorted(self._failures.items()))

    @property
    def _arguments(self) -> tuple[str, str, str, str]:
        name = self._backbone.name
        if name.startswith("onnx:"):
            name = f"onnx:{Path(name.removeprefix('onnx:')).absolute()}"
        return name, self._backbone.device, self._backbone.fingerprint, str(Path.cwd())

    def _not_in_cache(self) -> list[int]:
        """The pictures whose features must be computed. The cluster reads the others too, to know their keys."""
        everything = list(range(len(self._sources)))
        if self._cache is None or self._cache.size() == (0, 0):
            return everything
        keys: dict[int, bytes] = {}
        for places, row in self._mapped(everything, _KeyActor, (str(Path.cwd()),)):
            keys |= self._keys(places, row)
        readable = sorted(keys)
        for start in range(0, len(readable), _KEYS_AT_ONCE):
            part = readable[start : start + _KEYS_AT_ONCE]
            wanted = [keys[place] for place in part]
            known = self._cache.get(self._backbone.fingerprint, wanted, self._backbone.n_features)
            for place, key in zip(part, wanted, strict=True):
                if key in known:
                    self._found[place] = known[key]
                    del keys[place]
        return sorted(keys)

    def _mapped(self, places: Sequence[int], actor: type, arguments: tuple[str, ...]) -> Iterator[tuple[Any, Row]]:
        """What actors of this class return for each block of these pictures, as soon as it is there."""
        if not places:
            return
        gpus = 1 if actor is _FeatureActor and self._backbone.device.startswith("cuda") else 0
        room = int(self._ray.cluster_resources().get("GPU" if gpus else "CPU", 0))
        if not room:
            raise TridentError(f"the Ray cluster has no {'GPUs' if gpus else 'CPUs'}: give --device cpu or other nodes")
        size = min(max(len(places) // (_BLOCKS_FOR_EACH * room) // BATCH * BATCH, _LEAST), _MOST)
        blocks = [places[start : start + size] for start in range(0, len(places), size)]
        rows = [
            {"block": number, "sources": pickle.dumps([self._sources[place] for place in block])}
            for number, block in enumerate(blocks)
        ]
        data = self._ray.data
        data.DataContext.get_current().enable_progress_bars = False
        actors = min(room, len(blocks))
        mapped = data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            actor,
            fn_constructor_args=arguments,
            batch_size=1,
            num_cpus=1,
            num_gpus=gpus,
            compute=data.ActorPoolStrategy(min_size=1, max_size=actors, initial_size=actors),
        )
        try:
            for row in mapped.iter_rows():
                if row["problem"]:
                    raise TridentError(row["problem"])
                yield blocks[row["block"]], row
        except self._ray.exceptions.RayError as error:
            raise TridentError(f"the Ray cluster failed: {short_message(error)}") from error

    def _keys(self, places: Sequence[int], row: Row) -> dict[int, bytes]:
        """The keys of a block's pictures. Notes those that cannot be read, and checks that this machine agrees."""
        keys = dict(zip(places, pickle.loads(row["keys"]), strict=True))
        unread = {place: key for place, key in keys.items() if isinstance(key, str)}
        for place, why in unread.items():
            if isinstance(key_or_reason(self._sources[place]), bytes):
                raise TridentError(
                    f"a node of the cluster cannot read {why}; this machine can: the pile must be on a file system "
                    "that all nodes share, at the same path"
                )
        self._failures |= unread
        readable = {place: key for place, key in keys.items() if isinstance(key, bytes)}
        self.keys |= readable
        first = min(readable, default=None)  # one of each block will do
        if first is not None and key_or_reason(self._sources[first]) != readable[first]:
            raise TridentError(
                f"{self._sources[first].name} is another file on a node of the cluster, or it changed just now: the "
                "pile must be on a file system that all nodes share"
            )
        return readable

    def _report(self, count: int) -> None:
        self._done += count
        self._progress(self._done, len(self._sources))


class _KeyActor:
    """On a node of the cluster: reads pictures and returns their keys."""

    def __init__(self, folder: str):
        silence_pillow()
        with suppress(OSError):  # paths may be relative; if they cannot be found, the first picture tells
            os.chdir(folder)

    def __call__(self, batch: Row) -> Row:
        return {"block": batch["block"], "problem": [""]} | self.columns(pickle.loads(batch["sources"][0]))

    def columns(self, sources: list[ImageSource]) -> Row:
        return {"keys": [pickle.dumps([key_or_reason(source) for source in sources])]}


class _FeatureActor(_KeyActor):
    """Returns the features, too. Mistakes of the user come back as a line, because Ray would try again and again."""

    def __init__(self, name: str, device: str, fingerprint: str, folder: str):
        super().__init__(folder)
        keep_freed_memory()
        self._name, self._device, self._fingerprint = name, device, fingerprint

    @cached_property
    def _backbone(self) -> Pretrained:
        network = find_backbone(self._name, self._device)
        if network.fingerprint != self._fingerprint:
            raise TridentError(
                f"backbone {self._name} has other weights on a node of the cluster: install the same version everywhere"
            )
        return network

    def columns(self, sources: list[ImageSource]) -> Row:
        keys: dict[int, bytes] = {}
        try:
            features, bad = features_of(self._backbone, sources, None, keys=keys)
        except TridentError as error:
            row = {"keys": [b""], "features": [b""], "failures": ["{}"]}
            return row | {"problem": [f"on a node of the cluster: {error}"]}
        read = [keys[at] if at in keys else bad[at] for at in range(len(sources))]
        failures = json.dumps({at: why for at, why in bad.items() if at in keys})
        return {"keys": [pickle.dumps(read)], "features": [features.tobytes()], "failures": [failures]}
