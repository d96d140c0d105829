"""The features of pictures: decoded in the background, computed in batches, and cached on disk."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np

from trident.backbones.pretrained import BATCH, Pretrained
from trident.data.images import ImageSource, UnreadableImageError, in_memory
from trident.labelling.feature_cache import FeatureCache
from trident.progress import Progress

_WORKERS = 2  # threads that read and decode pictures
_CACHE_AT_ONCE = 32 * BATCH  # pictures looked up and stored at once; a killed process loses one batch only

Decoded = tuple[int, np.ndarray | str]  # the picture's index, and its pixels or why it cannot be read


def features_of(
    backbone: Pretrained,
    sources: Sequence[ImageSource],
    cache: FeatureCache | None,
    progress: Progress | None = None,
    keys: dict[int, bytes] | None = None,
) -> tuple[np.ndarray, dict[int, str]]:
    """Features (picture, feature) float32, and error messages by index. The rows of unreadable pictures are zero.

    `keys` gets the pictures' keys, of the very bytes that are decoded: a file may change after it was looked up.
    """
    keys = {} if keys is None else keys
    features = np.zeros((len(sources), backbone.n_features), np.float32)
    failures: dict[int, str] = {}
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, len(sources))

    workers = ThreadPoolExecutor(_WORKERS)
    try:
        for start in range(0, len(sources), _CACHE_AT_ONCE):
            part = range(start, min(start + _CACHE_AT_ONCE, len(sources)))
            missing = {place: sources[place] for place in part}
            if cache is not None:
                looked_up = list(workers.map(key_or_reason, missing.values()))
                wanted = [key for key in looked_up if isinstance(key, bytes)]
                known = cache.get(backbone.fingerprint, wanted, backbone.n_features)
                for place, key in zip(part, looked_up, strict=True):
                    if isinstance(key, str):
                        failures[place] = key
                        del missing[place]
                    elif key in known:
                        features[place], keys[place] = known[key], key
                        del missing[place]
            report(len(part) - len(missing))
            decoded = _decoded(backbone, missing, workers, keys)
            while batch := list(islice(decoded, BATCH)):
                pixels = {place: outcome for place, outcome in batch if not isinstance(outcome, str)}
                failures |= {place: outcome for place, outcome in batch if isinstance(outcome, str)}
                if pixels:
                    features[list(pixels)] = backbone.features(np.stack(list(pixels.values())))
                    if cache is not None:
                        cache.put(backbone.fingerprint, {keys[place]: features[place] for place in pixels})
                report(len(batch))
    finally:
        workers.shutdown(cancel_futures=True)  # on an error or Ctrl-C, pictures that wait are not decoded any more
    return features, dict(sorted(failures.items()))


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


def _decoded(
    backbone: Pretrained, sources: dict[int, ImageSource], workers: ThreadPoolExecutor, keys: dict[int, bytes]
) -> Iterator[Decoded]:
    """Decodes pictures in the background, two batches ahead of their use, and notes their keys."""

    def pixels(place: int) -> Decoded:
        try:
            source = in_memory(sources[place])
            keys[place] = source.key()
            return place, backbone.decoded(source)
        except UnreadableImageError as error:
            return place, str(error)

    remaining = iter(sources)
    waiting: deque[Future[Decoded]] = deque(workers.submit(pixels, place) for place in islice(remaining, 2 * BATCH))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(workers.submit(pixels, place) for place in islice(remaining, 1))
