"""Saved classifiers: the same answers in another process, and every file that is not whole is refused in one line."""

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from ablation_grids import Answer
from commands import assert_one_line_error
from made_up_latents import made_up_latents
from stand_in_backbone import NAME, made_up, picture, save_pictures
from trident.backbones.pretrained import find_backbone
from trident.data.images import ImageFile
from trident.errors import TridentError
from trident.labelling import saved
from trident.labelling.classifier import TridentClassifier
from trident.labelling.feature_labeller import FeatureLabeller
from trident.labelling.saved import load_classifier, save_classifier
from trident.methods.transductive.paddle import Paddle

LITE0 = "efficientnet-lite0"
NAMES = ("blue", "green", "red")
READ_AND_LABEL = """
import sys
import numpy as np
from trident.labelling.classifier import TridentClassifier
file, backbone, out, *pictures = sys.argv[1:]
model = TridentClassifier.load(file, "cpu", backbone)
np.savez(out, alone=model.predict_proba(pictures), together=model.transduce_proba(pictures), classes=model.classes_)
"""


def labelled_by(backbone: str) -> FeatureLabeller:
    pictures = [picture(name, place) for place in range(3) for name in NAMES]
    model = TridentClassifier(backbone=backbone, device="cpu", cache=False).fit(pictures, [*NAMES] * 3)
    assert isinstance(model.labeller_, FeatureLabeller)
    return model.labeller_


@pytest.fixture(scope="module")
def labeller() -> FeatureLabeller:
    return replace(labelled_by(NAME), latents=made_up_latents(32))


@pytest.fixture
def file(labeller: FeatureLabeller, tmp_path: Path) -> Path:
    save_classifier(labeller, tmp_path / "colours.trident")
    return tmp_path / "colours.trident"


@pytest.mark.slow
def test_the_same_probabilities_in_a_new_process(tmp_path: Path) -> None:
    labeller = labelled_by(LITE0)
    save_classifier(labeller, tmp_path / "colours.trident")
    save_pictures(tmp_path / "pile", dict.fromkeys(NAMES, 5), first=500)
    files = sorted((tmp_path / "pile").iterdir())
    arguments = [tmp_path / "colours.trident", "auto", tmp_path / "found.npz", *files]
    call = [sys.executable, "-c", READ_AND_LABEL, *map(str, arguments)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "found.npz")
    assert tuple(found["classes"]) == labeller.classes == NAMES
    features = labeller.raw_features([ImageFile(path) for path in files])
    np.testing.assert_array_equal(found["together"], labeller.label_features(features).probabilities)
    np.testing.assert_array_equal(found["alone"], labeller.label_features(features, together=False).probabilities)


def test_what_is_saved_is_all_there(file: Path, labeller: FeatureLabeller) -> None:
    again = load_classifier(file, backbone=NAME)
    assert again.classes == labeller.classes
    np.testing.assert_array_equal(again.features, labeller.features)
    np.testing.assert_array_equal(again.labels, labeller.labels)
    assert again.latents is not None and labeller.latents is not None
    assert again.latents.method == labeller.latents.method
    assert again.latents.parameters.keys() == labeller.latents.parameters.keys()
    for key, value in labeller.latents.parameters.items():
        np.testing.assert_array_equal(again.latents.parameters[key], value)
    save_classifier(replace(labeller, latents=None), file)
    assert load_classifier(file, backbone=NAME).latents is None


def refused(file: Path, backbone: str | None = NAME) -> str:
    with pytest.raises(TridentError) as caught:
        load_classifier(file, backbone=backbone)
    assert file.name in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def parts_of(content: bytes) -> dict[str, tuple[int, int]]:
    """Where the parts of a safetensors file lie."""
    header = int.from_bytes(content[:8], "little")
    about, rest = content.index(b"__metadata__"), content.index(b'"features":{')
    return {
        "length of the header": (0, 8),
        "header": (8, 8 + header),
        "metadata": (about, min(rest, 8 + header) if rest > about else 8 + header),
        "tensors": (8 + header, len(content)),
    }


@pytest.mark.parametrize("part", ["length of the header", "header", "metadata", "tensors"])
def test_a_changed_byte_is_refused(file: Path, part: str) -> None:
    content = file.read_bytes()
    start, end = parts_of(content)[part]
    generator = np.random.default_rng(start)
    places = [start, end - 1, *generator.integers(start, end, 40 if part != "length of the header" else 6)]
    for place in map(int, places):
        changed = bytearray(content)
        changed[place] ^= int(generator.integers(1, 256))
        if _reads_the_same(bytes(changed), content):
            continue  # blanks at the end of the header mean nothing
        file.write_bytes(changed)
        refused(file)


def _reads_the_same(changed: bytes, content: bytes) -> bool:
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        same_header = json.loads(changed[8:end]) == json.loads(content[8:end])
    except ValueError:
        return False
    return bool(same_header and changed[:8] == content[:8] and changed[end:] == content[end:])


@pytest.mark.parametrize("length", [0, 1, 8, 100, -1])
def test_a_file_that_was_cut_short_is_refused(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    refused(file)


def test_a_file_with_more_at_its_end_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")
    refused(file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    assert "make one with 'trident fit'" in refused(tmp_path / "nowhere.trident")
    assert "make one with 'trident fit'" in refused(tmp_path)
    for content in (b"", b"birds", b"\0" * 1000, save({"a": np.zeros(3)}), save({"a": np.zeros(3)}, {"format": "x"})):
        (tmp_path / "other.trident").write_bytes(content)
        assert "is not a classifier of" in refused(tmp_path / "other.trident")


def test_a_file_that_is_too_large_is_not_read(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(saved._MOST_BYTES + 1)  # takes no room on disk
    assert "larger than 2 GiB" in refused(file)


def read_parts(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with safe_open(file, "numpy") as opened:
        return json.loads(opened.metadata()["trident"]), {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118


def forge(file: Path, about: Any, tensors: dict[str, np.ndarray]) -> None:
    """With a checksum that is right, as somebody who means harm would write it."""
    text = about if isinstance(about, str) else json.dumps(about, sort_keys=True)
    digest = hashlib.sha256(text.encode())
    for key in sorted(tensors):
        digest.update(f"{key} {tensors[key].dtype.str} {tensors[key].shape}".encode())
        digest.update(np.ascontiguousarray(tensors[key]).tobytes())
    metadata = {"format": "trident-classifier-2", "trident": text, "checksum": digest.hexdigest()}
    file.write_bytes(save(tensors, metadata))


def test_forging_works(file: Path, labeller: FeatureLabeller) -> None:
    forge(file, *read_parts(file))
    assert load_classifier(file, backbone=NAME).classes == labeller.classes


FORGED: dict[str, Callable[[dict[str, Any], dict[str, np.ndarray]], Any]] = {
    "NaN": lambda about, tensors: tensors["features"].__setitem__((0, 0), np.nan),
    "infinity": lambda about, tensors: tensors["features"].__setitem__((0, 0), -np.inf),
    "64 bits": lambda about, tensors: tensors.update(features=tensors["features"].astype(np.float64)),
    "whole numbers": lambda about, tensors: tensors.update(features=tensors["features"].astype(np.int32)),
    "too few features": lambda about, tensors: tensors.update(features=tensors["features"][:, :-1].copy()),
    "no features": lambda about, tensors: tensors.update(features=np.zeros((9, 0), np.float32)),
    "no pictures": lambda about, tensors: tensors.update(
        features=np.zeros((0, 32), np.float32), labels=np.zeros(0, np.int64)
    ),
    "flat": lambda about, tensors: tensors.update(features=tensors["features"].ravel()),
    "fewer pictures": lambda about, tensors: tensors.update(features=tensors["features"][:4].copy()),
    "label too large": lambda about, tensors: tensors["labels"].__setitem__(0, 3),
    "huge label": lambda about, tensors: tensors["labels"].__setitem__(0, 2**62),
    "label below 0": lambda about, tensors: tensors["labels"].__setitem__(0, -1),
    "labels of other bits": lambda about, tensors: tensors.update(labels=tensors["labels"].astype(np.int32)),
    "a class without pictures": lambda about, tensors: about["classes"].append("yellow"),
    "one class": lambda about, tensors: about.update(classes=["red"]) or tensors.update(labels=np.zeros(9, np.int64)),
    "no classes": lambda about, tensors: about.update(classes=[]),
    "two of one name": lambda about, tensors: about.update(classes=["red", "red", "blue"]),
    "a class that is a number": lambda about, tensors: about.update(classes=["red", 3, "blue"]),
    "a class of no name": lambda about, tensors: about.update(classes=["red", "", "blue"]),
    "a class of none of these": lambda about, tensors: about.update(classes=["red", "none of these", "blue"]),
    "half a character": lambda about, tensors: about.update(classes=["red", "\ud800", "blue"]),
    "an endless name": lambda about, tensors: about.update(classes=["red", "x" * 5_000_000, "blue"]),
    "two names that look alike": lambda about, tensors: about.update(classes=["caf\u00e9", "cafe\u0301", "blue"]),
    "classes are a number": lambda about, tensors: about.update(classes=3),
    "no tensors": lambda about, tensors: tensors.pop("features"),
    "no labels": lambda about, tensors: tensors.pop("labels"),
    "no word on latents": lambda about, tensors: about.pop("latents"),
    "latents that are text": lambda about, tensors: about.update(latents="os.system"),
    "wider latents": lambda about, tensors: about["latents"].update(label_width=10**12),
    "latents too wide to count": lambda about, tensors: about["latents"].update(label_width=10**30),
    "latents without weights": lambda about, tensors: tensors.pop("latents/label.loc.weight"),
    "more weights": lambda about, tensors: tensors.update({"latents/more": np.zeros(3, np.float32)}),
    "latents of another size": lambda about, tensors: tensors.update(
        {"latents/training_mean": np.zeros(31, np.float32)}
    ),
    "a mask of the whole task": lambda about, tensors: about["latents"].update(mask_from="task"),
    "endless trust": lambda about, tensors: about["latents"].update(trust_from=-1e308, trust_to=1e308),
    "weights without latents": lambda about, tensors: about.update(latents=None),
    "a tensor too many": lambda about, tensors: tensors.update(more=np.zeros(3, np.float32)),
    "huge weights": lambda about, tensors: tensors["latents/label_network.weight"].fill(3e38),
    "weights of NaN": lambda about, tensors: tensors["latents/label.loc.weight"].__setitem__((0, 0), np.nan),
    "no backbone": lambda about, tensors: about.pop("backbone"),
    "another fingerprint": lambda about, tensors: about.update(fingerprint="0" * 64),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_file_is_refused(file: Path, name: str) -> None:
    about, tensors = read_parts(file)
    FORGED[name](about, tensors)
    forge(file, about, tensors)
    refused(file)


@pytest.mark.parametrize("about", ["", "3", "[]", "null", "{", "[" * 100_000, '{"classes": {}}'])
def test_forged_metadata_is_refused(file: Path, about: str) -> None:
    forge(file, about, read_parts(file)[1])
    refused(file)


def test_tensors_of_odd_types_are_refused(file: Path) -> None:
    import torch
    from safetensors.torch import save as save_torch

    for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        tensors = {"features": torch.zeros(9, 32, dtype=kind), "labels": torch.arange(9) % 3}
        file.write_bytes(save_torch(tensors, {"format": "trident-classifier-2"}))
        refused(file)


def test_zero_and_huge_features_are_taken(file: Path, labeller: FeatureLabeller) -> None:
    about, tensors = read_parts(file)
    tensors["features"][0] = 0
    tensors["features"][1] *= 1e18
    forge(file, about, tensors)
    pile, _ = made_up(3, 10, 32)
    assert np.isfinite(load_classifier(file, backbone=NAME).label_features(pile).probabilities).all()


def test_another_backbone_is_refused(file: Path) -> None:
    said = refused(file, LITE0)
    assert NAME in said and LITE0 in said and "do not fit" in said


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that leaves a trace when it is imported."""
    (tmp_path / "trap_module.py").write_text("from pathlib import Path\nPath('trace').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "trace"
    sys.modules.pop("trap_module", None)


@pytest.mark.parametrize(
    "name",
    [
        *("python:trap_module:network", "onnx:trap.onnx", "trap_module", "python:", "conv4"),
        *("weights:trap.safetensors", "weights:mini-simpleshot", "weights:./mini-ensemble"),
    ],
)
def test_nothing_that_only_a_file_names_is_run(file: Path, trap: Path, name: str, trident_here: Any) -> None:
    about, tensors = read_parts(file)
    forge(file, about | {"backbone": name}, tensors)
    said = refused(file, None)
    assert name in said and "if you trust it" in said
    (file.parent / "pile").mkdir()
    picture("red", 0).save(file.parent / "pile" / "0.png")
    assert_one_line_error(trident_here("predict", "--model", file, "--query", file.parent / "pile"), "if you trust it")
    assert not trap.exists()
    assert "trap_module" not in sys.modules


def test_the_command_refuses_in_one_line(file: Path, trident_here: Callable[..., Answer]) -> None:
    save_pictures(file.parent / "pile", {"red": 1})
    call = functools.partial(trident_here, "predict", "--query", file.parent / "pile", "--model")
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    (file.parent / "changed.trident").write_bytes(changed)
    assert_one_line_error(call(file.parent / "changed.trident", "--backbone", NAME), "checksum does not match")
    assert_one_line_error(call(file, "--backbone", LITE0), "do not fit")
    assert_one_line_error(call(file), "if you trust it, give --backbone")
    assert_one_line_error(call(file, "--weights", "mini-5w1s-set"), "exclude each other")
    assert_one_line_error(call(file, "--support", file.parent), "exclude each other")


def test_a_write_that_fails_leaves_the_old_file(
    file: Path, labeller: FeatureLabeller, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(TridentError, match="No space left on device"):
            save_classifier(replace(labeller, latents=None), file)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_what_cannot_be_saved(labeller: FeatureLabeller, tmp_path: Path) -> None:
    with pytest.raises(TridentError, match=r"must end in \.trident"):
        save_classifier(labeller, tmp_path / "birds.txt")
    with pytest.raises(TridentError, match="PADDLE cannot be saved"):
        save_classifier(replace(labeller, method=Paddle()), tmp_path / "birds.trident")
    with pytest.raises(TridentError, match="does not exist"):
        save_classifier(labeller, tmp_path / "nowhere" / "birds.trident")
    with pytest.raises(ValueError, match="needs another backbone than conv4"):
        pictures = [picture(name, 0) for name in NAMES]
        TridentClassifier(backbone="conv4").fit(pictures, NAMES).save(tmp_path / "birds.trident")
    assert list(tmp_path.iterdir()) == []


def test_labels_become_text(tmp_path: Path) -> None:
    model = TridentClassifier(backbone=NAME, cache=False).fit([picture(name, 0) for name in NAMES], [10, 2, 3])
    model.save(tmp_path / "numbers.trident")
    again = TridentClassifier.load(tmp_path / "numbers.trident", backbone=NAME, cache=False)
    assert list(again.classes_) == ["2", "3", "10"]
    assert list(again.predict([picture("red", 9)])) == [str(model.predict([picture("red", 9)])[0])]
    assert isinstance(again.labeller_, FeatureLabeller)
    assert again.labeller_.backbone.fingerprint == find_backbone(NAME).fingerprint
