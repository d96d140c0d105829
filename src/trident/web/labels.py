"""The answer to a request: a label or an error for each picture of the pile."""

from typing import Any

import numpy as np

from trident.errors import NotFiniteError
from trident.labelling.class_names import check_one_class_each
from trident.labelling.labelled import Labelled
from trident.web.limits import Check, RefusedError
from trident.web.networks import Network
from trident.web.uploads import Task, Upload


def task_of(upload: Upload) -> Task:
    """Skips unreadable labelled pictures; it is an error if a class has no other."""
    readable = [(place, picture.pixels, picture) for place, picture in upload.labelled if picture.pixels is not None]
    for place, name in enumerate(upload.classes):
        if all(place != other for other, _, _ in readable):
            bad = [picture.error for other, picture in upload.labelled if other == place]
            why = f"has no picture that can be read ({bad[0]})" if bad else "has no labelled picture"
            raise RefusedError(422, f"class '{name}' {why}", labelled=_labelled(upload))
    if not upload.pile:
        raise RefusedError(422, "there is no picture to label")
    check_one_class_each((picture.mark, upload.classes[place], picture.name) for place, _, picture in readable)
    labels = np.array([place for place, _, _ in readable], np.int64)
    return Task(tuple(upload.classes), [pixels for _, pixels, _ in readable], labels, upload)


def label(network: Network, task: Task, check: Check) -> dict[str, Any]:
    check()
    answer = described(network, task)
    try:
        labelled = network.label(task, check)
    except NotFiniteError as error:
        raise NotFiniteError(f"{answer['weights']['name']}: {error}") from error
    return answer | {
        "pile": [
            {"name": picture.name, "error": picture.error, "picture": picture.mark}
            | (_NOT_LABELLED if picture.pixels is None else _label(labelled, place))
            for place, picture in enumerate(task.upload.pile)
        ]
    }


def described(network: Network, task: Task) -> dict[str, Any]:
    return {
        "classes": list(task.classes),
        "weights": network.described_for(task),
        "labelled": _labelled(task.upload),
    }


_NOT_LABELLED = {"ranking": None, "none_of_these": False, "typicality": None}


def _label(labelled: Labelled, place: int) -> dict[str, Any]:
    return {
        "ranking": labelled.ranking(place),
        "none_of_these": labelled.belongs_to_none(place),
        "typicality": None if labelled.typicality is None else float(labelled.typicality[place]),
    }


def _labelled(upload: Upload) -> list[dict[str, Any]]:
    return [
        {"name": picture.name, "class": upload.classes[place], "error": picture.error}
        for place, picture in upload.labelled
    ]
