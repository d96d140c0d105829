"""The features of pictures: decoded in the background, computed in batches, and cached on disk.

A picture may change at any time. So features are kept by the key of the very bytes that were decoded, not by that of an
earlier look at the file.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

import numpy as np

from trident.backbones.pretrained import BATCH, Pretrained
from trident.data.images import ImageSource, UnreadableImageError, in_memory
from trident.labelling.feature_cache import FeatureCache
from trident.progress import Progress

_WORKERS = 2  # threads that read and decode pictures
_CACHE_AT_ONCE = 32 * BATCH  # pictures looked up and stored at once; a killed process loses one batch only


class Seen(NamedTuple):
    """What was found about a picture."""

    place: int
    key: bytes | None  # of the content that was decoded; None if it is not wanted, or cannot be read
    found: np.ndarray | str  # its pixels or features, or why there are none


def features_of(
    backbone: Pretrained, sources: Sequence[ImageSource], cache: FeatureCache | None, progress: Progress | None = None
) -> tuple[np.ndarray, dict[int, str]]:
    """Features (picture, feature) float32, and error messages by index. The rows of unreadable pictures are zero."""
    features = np.zeros((len(sources), backbone.n_features), np.float32)
    failures: dict[int, str] = {}
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, len(sources))

    with reading_threads() as workers:
        for start in range(0, len(sources), _CACHE_AT_ONCE):
            part = range(start, min(start + _CACHE_AT_ONCE, len(sources)))
            keys, bad = _keys(sources, part, workers) if cache is not None else ({}, {})
            failures |= bad
            known = cache.get(backbone.fingerprint, list(keys.values()), backbone.n_features) if cache else {}
            for place, key in keys.items():
                if key in known:
                    features[place] = known[key]
            missing = [place for place in part if place not in bad and keys.get(place) not in known]
            report(len(part) - len(missing))
            for batch in computed(backbone, sources, missing, cache is not None, workers):
                new = {}
                for place, key, found in batch:
                    if isinstance(found, str):
                        failures[place] = found
                    else:
                        features[place] = found
                        new[key or b""] = found
                if cache is not None:
                    cache.put(backbone.fingerprint, new)
                report(len(batch))
    return features, dict(sorted(failures.items()))


@contextmanager
def reading_threads() -> Iterator[ThreadPoolExecutor]:
    """On an error or Ctrl-C, pictures that wait are not decoded any more."""
    workers = ThreadPoolExecutor(_WORKERS)
    try:
        yield workers
    finally:
        workers.shutdown(cancel_futures=True)


def readable_features(backbone: Pretrained, sources: Sequence[ImageSource], cache: FeatureCache | None) -> np.ndarray:
    """Features (picture, feature). A picture that cannot be read is an error."""
    features, failures = features_of(backbone, sources, cache)
    if failures:
        raise UnreadableImageError(next(iter(failures.values())))
    return features


def key_or_reason(source: ImageSource) -> bytes | str:
    """The picture's key, or why it cannot be read."""
    try:
        return source.key()
    except UnreadableImageError as error:
        return str(error)


def _keys(
    sources: Sequence[ImageSource], part: range, workers: ThreadPoolExecutor
) -> tuple[dict[int, bytes], dict[int, str]]:
    """The keys of these pictures in the cache, and error messages."""
    found = dict(zip(part, workers.map(lambda place: key_or_reason(sources[place]), part), strict=True))
    keys = {place: one for place, one in found.items() if isinstance(one, bytes)}
    return keys, {place: one for place, one in found.items() if isinstance(one, str)}


def computed(
    backbone: Pretrained,
    sources: Sequence[ImageSource],
    places: Sequence[int],
    keyed: bool,
    workers: ThreadPoolExecutor,
) -> Iterator[list[Seen]]:
    """The features of these pictures, in batches; with `keyed`, and their keys."""
    decoded = _decoded(backbone, sources, places, keyed, workers)
    while batch := list(islice(decoded, BATCH)):
        pixels = [one.found for one in batch if not isinstance(one.found, str)]
        features = iter(backbone.features(np.stack(pixels)) if pixels else ())
        yield [one if isinstance(one.found, str) else one._replace(found=next(features)) for one in batch]


def _decoded(
    backbone: Pretrained,
    sources: Sequence[ImageSource],
    places: Sequence[int],
    keyed: bool,
    workers: ThreadPoolExecutor,
) -> Iterator[Seen]:
    """Decodes pictures in the background, two batches ahead of their use."""

    def pixels(place: int) -> Seen:
        key = None
        try:
            source = in_memory(sources[place])
            key = source.key() if keyed else None
            return Seen(place, key, backbone.decoded(source))
        except UnreadableImageError as error:
            return Seen(place, key, str(error))

    remaining = iter(places)
    waiting: deque[Future[Seen]] = deque(workers.submit(pixels, place) for place in islice(remaining, 2 * BATCH))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(workers.submit(pixels, place) for place in islice(remaining, 1))
