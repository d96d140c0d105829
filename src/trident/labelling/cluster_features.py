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
from dataclasses import dataclass, field, replace
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

Row = dict[str, Any]  # of a dataset: one block of pictures, or what is known about it
Network = tuple[str, str, str]  # the backbone's name, device and fingerprint


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
        features, failures = dealt.features_and_failures()
    return replace(labeller.label_computed(features, failures), keys=dealt.keys)


@dataclass
class _Pile:
    """The command's side: it cuts the pile into blocks and collects what comes back."""

    ray: ModuleType
    backbone: Pretrained
    sources: Sequence[ImageSource]
    cache: FeatureCache | None
    progress: Progress
    failures: dict[int, str] = field(default_factory=dict)
    keys: dict[int, bytes] = field(default_factory=dict)

    def features_and_failures(self) -> tuple[np.ndarray, dict[int, str]]:
        """As `features_of` returns them."""
        features = np.zeros((len(self.sources), self.backbone.n_features), np.float32)
        missing = self._not_in_cache(features)
        done = len(self.sources) - len(missing)
        self.progress(done, len(self.sources))
        name, fingerprint = self.backbone.name, self.backbone.fingerprint
        if name.startswith("onnx:"):
            name = f"onnx:{Path(name.removeprefix('onnx:')).absolute()}"
        for places, row in self._mapped(missing, (name, self.backbone.device, fingerprint)):
            features[places] = np.frombuffer(row["features"], np.float32).reshape(len(places), features.shape[1])
            keys = self._keys(places, row)
            self.failures |= {places[int(at)]: why for at, why in json.loads(row["failures"]).items()}
            if self.cache is not None:
                good = {key: features[place] for place, key in keys.items() if place not in self.failures}
                self.cache.put(fingerprint, good)
            done += len(places)
            self.progress(done, len(self.sources))
        return features, dict(sorted(self.failures.items()))

    def _not_in_cache(self, features: np.ndarray) -> list[int]:
        """The pictures whose features must be computed; `features` gets the others.

        The cluster reads all of them, to know their keys.
        """
        everything = list(range(len(self.sources)))
        if self.cache is None or self.cache.size() == (0, 0):
            return everything
        keys: dict[int, bytes] = {}
        for places, row in self._mapped(everything, None):
            keys |= self._keys(places, row)
        readable, missing = sorted(keys), []
        for start in range(0, len(readable), _KEYS_AT_ONCE):
            part = readable[start : start + _KEYS_AT_ONCE]
            known = self.cache.get(self.backbone.fingerprint, [keys[place] for place in part], features.shape[1])
            for place in part:
                if keys[place] in known:
                    features[place] = known[keys[place]]
                else:
                    missing.append(place)
        return missing

    def _mapped(self, places: Sequence[int], network: Network | None) -> Iterator[tuple[Any, Row]]:
        """What actors return for each block of these pictures, as soon as it is there. No `network`: keys only."""
        if not places:
            return
        gpus = 1 if network is not None and self.backbone.device.startswith("cuda") else 0
        room = int(self.ray.cluster_resources().get("GPU" if gpus else "CPU", 0))
        if not room:
            raise TridentError(f"the Ray cluster has no {'GPUs' if gpus else 'CPUs'}: give --device cpu or other nodes")
        size = min(max(len(places) // (_BLOCKS_FOR_EACH * room) // BATCH * BATCH, _LEAST), _MOST)
        blocks = [places[start : start + size] for start in range(0, len(places), size)]
        rows = [
            {"block": number, "sources": pickle.dumps([self.sources[place] for place in block])}
            for number, block in enumerate(blocks)
        ]
        data = self.ray.data
        data.DataContext.get_current().enable_progress_bars = False
        actors = min(room, len(blocks))
        mapped = data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            _Actor,
            fn_constructor_args=(str(Path.cwd()), network),
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
        except self.ray.exceptions.RayError as error:
            raise TridentError(f"the Ray cluster failed: {short_message(error)}") from error

    def _keys(self, places: Sequence[int], row: Row) -> dict[int, bytes]:
        """The keys of a block's pictures. Notes those that cannot be read, and checks that this machine agrees."""
        keys = dict(zip(places, pickle.loads(row["keys"]), strict=True))
        unread = {place: key for place, key in keys.items() if isinstance(key, str)}
        for place, why in unread.items():
            if isinstance(key_or_reason(self.sources[place]), bytes):
                raise TridentError(
                    f"a node of the cluster cannot read {why}; this machine can: the pile must be on a file system "
                    "that all nodes share, at the same path"
                )
        self.failures |= unread
        readable = {place: key for place, key in keys.items() if isinstance(key, bytes)}
        self.keys |= readable
        first = min(readable, default=None)  # one of each block will do
        if first is not None and key_or_reason(self.sources[first]) != readable[first]:
            raise TridentError(
                f"{self.sources[first].name} is another file on a node of the cluster, or it changed just now: the "
                "pile must be on a file system that all nodes share"
            )
        return readable


class _Actor:
    """On a node of the cluster: reads pictures and returns their keys; if it has a network, their features too.

    Mistakes of the user come back as a line, because Ray would try again and again.
    """

    def __init__(self, folder: str, network: Network | None):
        silence_pillow()
        if network is not None:
            keep_freed_memory()
        with suppress(OSError):  # paths may be relative; if they cannot be found, the first picture tells
            os.chdir(folder)
        self._network = network

    def __call__(self, batch: Row) -> Row:
        sources: list[ImageSource] = pickle.loads(batch["sources"][0])
        row: Row = {"block": batch["block"][0], "problem": "", "keys": b"", "features": b"", "failures": "{}"}
        if self._network is None:
            row["keys"] = pickle.dumps([key_or_reason(source) for source in sources])
        else:
            try:
                row |= self._with_features(sources)
            except TridentError as error:
                row["problem"] = f"on a node of the cluster: {error}"
        return {name: [value] for name, value in row.items()}

    @cached_property
    def _backbone(self) -> Pretrained:
        assert self._network is not None
        name, device, fingerprint = self._network
        backbone = find_backbone(name, device)
        if backbone.fingerprint != fingerprint:
            raise TridentError(
                f"backbone {name} has other weights on a node of the cluster: install the same version everywhere"
            )
        return backbone

    def _with_features(self, sources: list[ImageSource]) -> Row:
        keys: dict[int, bytes] = {}
        features, bad = features_of(self._backbone, sources, None, keys=keys)
        read = [keys[at] if at in keys else bad[at] for at in range(len(sources))]
        failures = json.dumps({at: why for at, why in bad.items() if at in keys})
        return {"keys": pickle.dumps(read), "features": features.tobytes(), "failures": failures}
