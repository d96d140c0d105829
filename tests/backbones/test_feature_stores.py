"""Stores of features: made from a dataset, measured without training, and not mixed up with stores of pictures."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ablation_grids import Answer
from commands import assert_one_line_error
from stand_in_backbone import COLOURS, NAME, picture
from stores import write_store
from trident.backbones import feature_store
from trident.backbones.feature_store import features_of_store
from trident.backbones.frozen import FrozenBackbone
from trident.backbones.pretrained import find_backbone
from trident.data.glyphs import open_glyphs
from trident.data.images import ImageFile, Target
from trident.data.store import ImageStore, class_table, open_store
from trident.errors import TridentError
from trident.leaderboard.measuring import Features
from trident.learning.checkpoint import untrained
from trident.learning.frozen_weights import with_conv4
from trident.learning.run_start import restart_run, start_run
from trident.measuring import inputs
from trident.measuring.evaluate import evaluate
from trident.recipes.loading import load_recipe, with_overrides

Here = Callable[..., Answer]
RECIPE = f"""
summary = "features of a small network"
dataset = "a store of features"

[backbone]
name = "frozen"
of = "{NAME}"
size = 32

[episode]
n_way = 3
n_shot = 1
n_query = 4

[method]
name = "METHOD"
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four classes for each split, of eight pictures each."""
    where = tmp_path_factory.mktemp("dataset")
    for first, split in enumerate(("train", "val", "test")):
        for colour in COLOURS:
            (where / "pictures" / split / f"{split} {colour}").mkdir(parents=True)
            for place in range(8):
                path = where / "pictures" / split / f"{split} {colour}" / f"{place}.png"
                picture(colour, 100 * first + place).save(path)
    return where


@pytest.fixture
def here(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(dataset)
    return dataset


@pytest.fixture
def stores(here: Path, trident_here: Here) -> Path:
    """One of features and one of pictures."""
    if not (here / "features.store").exists():
        call = ("data", "prepare", "folder", "--from", "pictures", "--to")
        made = trident_here(*call, "features.store", "--features", NAME)
        assert made.returncode == 0, made.stderr
        assert "wrote features.store: features of 96 images of 12 classes" in made.stderr
        assert trident_here(*call, "pictures.store", "--image-size", 32).returncode == 0
        for method in (
            "soft-kmeans",
            "nearest-mean",
            "paddle",
            "alpha-tim",
            "logistic-regression",
            "nearest-neighbours",
        ):
            (here / f"{method}.toml").write_text(RECIPE.replace("METHOD", method))
        conv4 = 'summary = "s"\ndataset = "d"\n[method]\nname = "nearest-mean"\n'
        (here / "conv4.toml").write_text(conv4)
    return here


def test_the_features_are_those_of_the_pictures(stores: Path, trident_here: Here) -> None:
    store = open_store(stores / "features.store")
    assert (store.features_of, store.images.shape, str(store.images.dtype)) == (NAME, (96, 32), "float32")
    backbone = find_backbone(NAME)
    first = store.classes_of("val")[1]
    files = sorted((stores / "pictures" / "val" / first.name).iterdir())
    pixels = np.stack([Target(backbone.facts.image_size, 3).decode(ImageFile(path)) for path in files])
    np.testing.assert_allclose(store.images[first.start :][: first.count], backbone.features(pixels), atol=1e-6)
    shown = json.loads(trident_here("data", "show", "features.store", "--verify", "--json").stdout)
    assert (shown["features_of"], shown["features"], shown["images"]) == (NAME, 32, 96)
    assert NAME in trident_here("data", "show", "features.store").stdout


@pytest.mark.parametrize(
    "method", ["soft-kmeans", "nearest-mean", "paddle", "alpha-tim", "logistic-regression", "nearest-neighbours"]
)
def test_methods_are_measured_without_training(stores: Path, trident_here: Here, method: str) -> None:
    few = ("method.steps=5",) if method == "alpha-tim" else ("penalty=1",) if method == "paddle" else ()
    call = ("evaluate", f"{method}.toml", "--data", "features.store", "--tasks", 3, "--json")
    found = trident_here(*call, *few)
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["accuracy"] > 95
    assert result["weights"]["recipe"] == method and result["weights"]["trained_on"] is None
    assert json.loads(trident_here(*call, *few).stdout) == result


def test_the_included_recipe_says_what_to_do_and_takes_other_features(stores: Path, trident_here: Here) -> None:
    shape = ("episode.n_way=3", "episode.n_query=4")
    call = ("evaluate", "features-soft-kmeans", "--data", "features.store", "--tasks", 3, *shape)
    assert_one_line_error(
        trident_here(*call), f"holds features of {NAME}", "features of efficientnet-lite0", "--features"
    )
    assert_one_line_error(trident_here(*call, f"backbone.of={NAME}"), "32 features", "backbone.size is 1280")
    found = trident_here(*call, f"backbone.of={NAME}", "backbone.size=32")
    assert found.returncode == 0, found.stderr
    assert f"features of {NAME}" in found.stdout and "not trained" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "soft-kmeans.toml", "--data", "pictures.store"], ["holds pictures", "--features"]),
        (["train", "glyphs", "--data", "features.store", "--out", "run"], ["holds features of"]),
        (["evaluate", "mini-5w1s-set", "--data", "features.store"], ["holds features of"]),
        (
            ["train", "soft-kmeans.toml", "--data", "features.store", "--out", "run"],
            ["needs no training", "trident evaluate"],
        ),
        (["evaluate", "features-trident", "--data", "features.store"], ["takes features of efficientnet-lite0"]),
        (["evaluate", "soft-kmeans.toml"], ["--data STORE"]),
        (
            ["evaluate", "soft-kmeans.toml", "--data", "features.store", "views.mirrored=true"],
            ["mirror images too", "features have no views"],
        ),
        (["evaluate", "conv4.toml", "--data", "pictures.store"], ["backbone without weights"]),
        (["evaluate", "nowhere.toml", "--data", "pictures.store"], ["nowhere.toml"]),
    ],
)
def test_stores_of_the_wrong_kind(stores: Path, trident_here: Here, arguments: list[str], words: list[str]) -> None:
    found = trident_here(*arguments)
    found.stderr = found.stderr.rpartition("python: backbones are not run here.\n")[2]
    assert_one_line_error(found, *words)
    assert not (stores / "run").exists()


def test_a_run_refuses_features_of_a_backbone_that_has_changed(stores: Path) -> None:
    store, settings = open_store(stores / "features.store"), ["backbone.of=" + NAME, "backbone.size=32"]
    assert store.features_fingerprint == find_backbone(NAME).fingerprint
    few = [*settings, "episode.n_way=3", "episode.n_query=3", "training.task_ways=3", "training.validation_tasks=2"]
    recipe = with_overrides(load_recipe("features-trident"), few)
    assert isinstance(recipe.backbone, FrozenBackbone)
    run = start_run(recipe, store, "features.store", stores / "run of features", "cpu")
    assert run.recipe.backbone == replace(recipe.backbone, fingerprint=store.features_fingerprint)
    assert restart_run(recipe, store, stores / "run of features") is not None
    older, changed = (replace(store, features_fingerprint=one) for one in ("", "f" * 64))
    for other in (store, older):
        run.recipe.backbone.check_store(other)
    wanted = rf"was made with another version of {NAME} \(ffffffffffff, not {store.features_fingerprint[:12]}\)"
    with pytest.raises(TridentError, match=wanted):
        evaluate(run, changed, split="val", tasks=2, seed=0)
    with pytest.raises(TridentError, match="was made with another version"):
        Features("cpu").of(changed, find_backbone(NAME), ["test"])
    of_glyphs = FrozenBackbone("weights:glyphs-simpleshot", 16, fingerprint="f" * 64)
    with pytest.raises(TridentError, match="there is only another version of weights:glyphs-simpleshot"):
        with_conv4(untrained(replace(load_recipe("features-nearest-mean"), backbone=of_glyphs)))


def test_stored_features_are_compared_with_the_weights(stores: Path, trident_here: Here) -> None:
    """Weights and ONNX files may be replaced after their features were stored. Python functions are not run."""
    name, settings = "weights:glyphs-simpleshot", ("episode.n_way=3", "episode.n_query=3")
    table = class_table([(f"class {place}", "test", 8) for place in range(3)])
    rows = np.random.default_rng(0).normal(size=(24, 16)).astype(np.float32)
    said = []
    (stores / "damaged").write_bytes(b"no weights")
    names = (name, "weights:gone", "weights:damaged", "python:no_such:made", "onnx:gone")
    for of in ((name, find_backbone(name).fingerprint), (name,), *((one, "f" * 64) for one in names)):
        write_store(stores / "of weights.store", "made up", table, iter(rows), *of)
        call = (
            "--data",
            "of weights.store",
            "--split",
            "test",
            "--tasks",
            2,
            f"backbone.of={of[0]}",
            "backbone.size=16",
            *settings,
        )
        said.append(trident_here("evaluate", "features-nearest-mean", *call))
    right, older, changed, gone, damaged, python, gone_too = said
    for one in (right, gone, gone_too):
        assert (one.returncode, one.stderr) == (0, "")
    assert_one_line_error(damaged, "damaged is damaged or no safetensors file")
    assert python.returncode == 0 and python.stderr.count("\n") == 1
    assert "of python:no_such:made in the store of made up are not compared: python: backbones are not" in python.stderr
    assert older.returncode == 0 and older.stderr.count("\n") == 1
    assert (
        f"store of made up does not record which version of {name} made it, so a change of {name} would" in older.stderr
    )
    assert_one_line_error(changed, f"store of made up was made with another version of {name} (ffffffffffff, not")


def test_weights_of_grey_pictures_are_a_backbone(stores: Path, trident_here: Here) -> None:
    network = find_backbone("weights:glyphs-simpleshot")
    file = ImageFile(next((stores / "pictures" / "val" / "val red").iterdir()))
    np.testing.assert_array_equal(network.decoded(file), Target(28, 1).decode(file))
    call = ("data", "prepare", "folder", "--from", "pictures", "--to", "grey.store", "--features", network.name)
    assert trident_here(*call).returncode == 0
    shown = json.loads(trident_here("data", "show", "grey.store", "--json").stdout)
    assert (shown["features_of"], shown["features_fingerprint"]) == (network.name, network.fingerprint)
    colour = replace(open_glyphs(), images=np.zeros((1, 28, 28, 3), np.uint8))
    with pytest.raises(TridentError, match="are 28x28 in colour, but weights:glyphs-simpleshot takes 28x28 in grey"):
        feature_store.features_of_store(colour, network)


def test_bad_requests_for_features(here: Path, trident_here: Here) -> None:
    call = functools.partial(trident_here, "data", "prepare", "folder", "--from", "pictures", "--to", "x.store")
    assert_one_line_error(call("--features", "resnet"), "no backbone is called 'resnet'")
    assert_one_line_error(call("--features", NAME, "--image-size", 64), "exclude each other")
    (here / "broken" / "train" / "a").mkdir(parents=True, exist_ok=True)
    (here / "broken" / "train" / "a" / "0.png").write_bytes(b"no")
    found = trident_here("data", "prepare", "folder", "--from", "broken", "--to", "x.store", "--features", NAME)
    assert found.returncode == 2 and "0.png" in found.stderr
    assert not list(here.glob("*x.store*"))


def test_features_replace_no_file(here: Path, trident_here: Here) -> None:
    (here / "mine.store").write_bytes(b"another dataset")
    call = ("data", "prepare", "folder", "--from", "pictures", "--to", "mine.store", "--features", NAME)
    assert_one_line_error(trident_here(*call), "mine.store exists already")
    assert (here / "mine.store").read_bytes() == b"another dataset"


def test_a_store_of_features_is_checked_when_it_is_read_and_written(tmp_path: Path) -> None:
    table = class_table([("a", "test", 2), ("b", "test", 2)])
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    write_store(tmp_path / "good.store", "made up", table, iter(rows), "net")
    np.testing.assert_array_equal(open_store(tmp_path / "good.store").images, rows)
    with pytest.raises(TridentError, match="float64"):
        write_store(tmp_path / "bad.store", "made up", table, iter(rows.astype(np.float64)), "net")
    with pytest.raises(TridentError, match="3 images came for a class table of 4"):
        write_store(tmp_path / "bad.store", "made up", table, iter(rows[:3]), "net")
    with pytest.raises(TridentError, match="uint8"):
        write_store(tmp_path / "bad.store", "made up", table, iter(rows))  # not said to be features
    assert [path.name for path in tmp_path.iterdir()] == ["good.store"]
    content = (tmp_path / "good.store").read_bytes()
    (tmp_path / "other.store").write_bytes(content.replace(b'"features_of"', b'"feature_of_"'))
    (tmp_path / "short.store").write_bytes(content[:-5])
    for name in ("other.store", "short.store"):
        with pytest.raises(TridentError, match="is not a trident store"):
            open_store(tmp_path / name)


@pytest.fixture
def few_glyphs(tmp_path: Path) -> ImageStore:
    """Six letters of each split, 20 images of each."""
    all_of_them = open_glyphs()
    chosen = [entry for split in ("train", "val", "test") for entry in all_of_them.classes_of(split)[:6]]
    table = class_table([(entry.name, entry.split, entry.count) for entry in chosen])
    images = (image for entry in chosen for image in all_of_them.images[entry.start : entry.start + entry.count])
    write_store(tmp_path / "few.store", "glyphs", table, images)
    return open_store(tmp_path / "few.store")


@pytest.mark.parametrize(
    ("recipe", "images"),
    [("features-nearest-mean", 120), ("features-bd-cspn", 240)],  # the second needs training images too
)
def test_only_the_needed_splits_get_features_of_weights(
    recipe: str,
    images: int,
    few_glyphs: ImageStore,
    tmp_path: Path,
    trident_here: Here,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []
    compute = feature_store.features_of_store

    def spy(*arguments: Any) -> ImageStore:
        found = compute(*arguments)
        computed.append(len(found.images))
        return found

    monkeypatch.setattr(inputs, "features_of_store", spy)
    call = [recipe, "--split", "val", "--tasks", "20", "--json", "--data", tmp_path / "few.store"]
    measured = trident_here("evaluate", *call, "backbone.of=weights:glyphs-simpleshot", "backbone.size=16")
    assert computed == [images]  # of 360
    found = json.loads(measured.stdout)
    changed = with_overrides(load_recipe(recipe), ["backbone.of=weights:glyphs-simpleshot", "backbone.size=16"])
    all_features = features_of_store(few_glyphs, find_backbone("weights:glyphs-simpleshot"))
    expected = evaluate(untrained(changed), all_features, split="val", tasks=20, seed=0)  # the same tasks
    assert found["accuracy"] == pytest.approx(expected.accuracy)
