"""`trident web` with pretrained features, over HTTP."""

import functools
import io
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ablation_grids import Answer
from commands import assert_one_line_error
from trident.backbones.pretrained import BACKBONES, BATCH, DEFAULT, INCLUDED, Pretrained, find_backbone
from trident.data.images import ImageFile
from trident.labelling.making import HINT, make_labeller
from trident.learning.checkpoint import load_checkpoint, save_checkpoint
from trident.learning.frozen_weights import without_conv4
from trident.web.limits import Limits
from trident.web.networks import FeatureMemory, FeatureNetwork, WeightStore, open_network
from web_backbone import NAME, Counting
from web_server import COLOURS, File, Site, body_of, command, picture, pile, site, three_classes, until

GREY = ("grey.png", picture((150, 150, 150), 5))
TAB, OTHER_TAB = "0123456789abcdef" * 2, "f" * 32


@pytest.fixture(scope="module")
def backbone() -> Pretrained:
    return find_backbone(NAME)


@pytest.fixture(scope="module")
def by_features(backbone: Pretrained) -> Iterator[Site]:
    with site(FeatureNetwork(backbone)) as running:
        yield running


def with_tab(tab: str) -> list[tuple[str, tuple[None, bytes]]]:
    return [("tab", (None, tab.encode()))]


def in_files(folder: Path, files: list[File]) -> list[ImageFile]:
    folder.mkdir()
    for name, content in files:
        (folder / name).write_bytes(content)
    return [ImageFile(folder / name) for name, _ in files]


def assert_same_as_library(answer: dict[str, Any], backbone: str, asked: list[File], folder: Path) -> None:
    labelled = {name: in_files(folder / name, files) for name, files in three_classes().items()}
    expected = make_labeller(labelled, backbone).label(in_files(folder / "the pile", asked))
    assert expected.typicality is not None
    assert [one["name"] for one in answer["pile"]] == [name for name, _ in asked]
    for place, one in enumerate(answer["pile"]):
        if place in expected.failures:
            assert one["error"].startswith(f"{one['name']}: ")
            assert (one["ranking"], one["none_of_these"], one["typicality"]) == (None, False, None)
            continue
        names, shares = zip(*expected.ranking(place), strict=True)
        assert tuple(name for name, _ in one["ranking"]) == names
        np.testing.assert_allclose([share for _, share in one["ranking"]], shares, atol=1e-6)
        assert one["none_of_these"] == expected.belongs_to_none(place)
        assert one["typicality"] == pytest.approx(expected.typicality[place], abs=1e-6)


@pytest.mark.parametrize("n", [4, 40])
def test_the_answer_is_the_librarys(by_features: Site, n: int, tmp_path: Path) -> None:
    """Alone and together; with an unreadable picture and one that belongs to none of the classes."""
    asked = [*pile(n), ("bad.png", b"bad"), GREY]
    status, answer = by_features.ask(three_classes(), asked)
    assert status == 200, answer
    assert_same_as_library(answer, NAME, asked, tmp_path)
    assert [one["none_of_these"] for one in answer["pile"]] == [False] * (n + 1) + [True]
    assert answer["pile"][-1]["ranking"][0][0] in COLOURS
    assert answer["weights"]["name"] == NAME


@pytest.mark.slow
def test_the_usual_backbone_is_efficientnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A photograph of many pixels is decoded at a fraction of its size, as `trident predict` does."""
    if not BACKBONES[DEFAULT].installed:
        pytest.skip("the features extra is not installed")
    load_once = functools.cache(find_backbone)
    for module in ("trident.web.networks", "trident.labelling.making"):
        monkeypatch.setattr(f"{module}.find_backbone", load_once)
    network = open_network("auto", "auto", "cpu")
    noise = np.random.default_rng(0).integers(0, 256, (120, 90, 3), np.uint8)
    large = io.BytesIO()
    Image.fromarray(noise).resize((1800, 2400), Image.Resampling.BICUBIC).save(large, "JPEG")
    asked = [*pile(3), ("large.jpg", large.getvalue())]
    with site(network) as running:
        about = json.loads(running.get("/api/about")[2])
        status, answer = running.ask(three_classes(), asked)
    assert about["hint"] is None
    assert about["weights"] == [answer["weights"]]
    expected = {"name": DEFAULT, "described": "trained on ImageNet-1k", "size": 224, "features": True, "latents": False}
    assert about["weights"][0].items() >= expected.items()
    assert status == 200, answer
    assert [one["ranking"][0][0] for one in answer["pile"][:3]] == list(COLOURS)
    assert_same_as_library(answer, DEFAULT, asked, tmp_path)


def test_without_the_extra_included_features_are_used_and_the_page_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = replace(BACKBONES[DEFAULT], module="no_such_package")
    monkeypatch.setitem(BACKBONES, DEFAULT, missing)
    network = open_network("auto", "auto", "cpu")
    assert isinstance(network, FeatureNetwork)
    with site(network) as running:
        about = json.loads(running.get("/api/about")[2])
        status, answer = running.ask(three_classes(), pile(4))
    assert about["hint"] == HINT
    assert [(one["name"], one["described"]) for one in about["weights"]] == [(INCLUDED, "trained on mini-imagenet")]
    assert about["weights"][0]["included"]
    assert status == 200 and [one["ranking"][0][0] for one in answer["pile"]] == [*COLOURS, next(iter(COLOURS))]
    asked = open_network(INCLUDED, "auto", "cpu")
    assert (type(asked), asked.hint) == (FeatureNetwork, None)
    for backbone, weights in (("conv4", "auto"), ("auto", "mini-5w1s-set")):  # they were asked for
        chosen = open_network(backbone, weights, "cpu")
        assert (type(chosen), chosen.hint) == (WeightStore, None)


def test_conv4_judges_no_picture_atypical(plain: Site) -> None:
    _, answer = plain.ask(three_classes(), [*pile(6), GREY])
    assert {(one["none_of_these"], one["typicality"]) for one in answer["pile"]} == {(False, None)}


def test_there_are_no_latents_to_look_at(by_features: Site) -> None:
    status, answer = by_features.ask(three_classes(), pile(1), "/api/look")
    assert (status, "there is nothing to look at" in answer["error"]) == (422, True)


def test_the_folder_of_an_onnx_file_is_not_shown(backbone: Pretrained) -> None:
    network = FeatureNetwork(replace(backbone, name="onnx:/home/somebody/secret/eyes.onnx"))
    assert network.described()[0]["name"] == "onnx:eyes.onnx"
    network = FeatureNetwork(replace(backbone, name="weights:/home/somebody/secret/mini-ensemble"))
    assert network.described()[0]["name"] == "weights of mini-ensemble"  # the included ones are weights:mini-ensemble


def test_a_tab_that_labels_again_waits_for_new_pictures_only(backbone: Pretrained) -> None:
    counting = Counting(backbone)
    with site(FeatureNetwork(replace(backbone, compute=counting))) as running:

        def computed(n_pile: int, *tab: str) -> int:
            before = counting.computed
            more = [part for one in tab for part in with_tab(one)]
            status, answer = running.ask(three_classes(), pile(n_pile), more=more)
            assert status == 200, answer
            answers.append(answer["pile"][:5])
            return counting.computed - before

        answers: list[Any] = []
        assert computed(5, TAB) == 6 + 5
        assert computed(5, TAB) == 0
        assert computed(7, TAB) == 2
        assert computed(5, OTHER_TAB) == 6 + 5  # nobody finds out what others have sent
        assert [computed(5), computed(5)] == [11, 11]
        assert all(answer == answers[0] for answer in (answers[1], *answers[3:]))
        for bad in ("", "short", "x" * 32, "a" * 5000):
            status, answer = running.ask(three_classes(), pile(1), more=with_tab(bad))
            assert (status, answer["error"]) == (422, "tab must have 32 hexadecimal digits")


def test_a_request_stops_after_one_batch_and_what_is_done_is_done(backbone: Pretrained) -> None:
    counting = Counting(backbone)
    n = 5 * BATCH
    body, kind = body_of(three_classes(), pile(n), with_tab(TAB))
    with site(FeatureNetwork(replace(backbone, compute=counting))) as running:
        counting.let_go.clear()
        with closing(running.connection()) as leaving:
            leaving.request("POST", "/api/label", body, {"Content-Type": kind})
            assert until(lambda: counting.computed == BATCH)
        time.sleep(0.3)  # until the server has noticed
        counting.let_go.set()
        assert running.ask(three_classes(), pile(1))[0] == 200
        assert counting.computed == BATCH + 7
        assert running.ask(three_classes(), pile(n), more=with_tab(TAB))[0] == 200
        assert counting.computed == BATCH + 7 + (n + 6 - BATCH)


def test_what_takes_too_long_is_stopped(backbone: Pretrained) -> None:
    counting = Counting(backbone)
    with site(FeatureNetwork(replace(backbone, compute=counting)), Limits(seconds=0.8)) as running:
        counting.let_go.clear()
        with ThreadPoolExecutor(1) as clients:
            asked = clients.submit(running.ask, three_classes(), pile(3 * BATCH))
            assert until(lambda: counting.computed)
            time.sleep(0.9)
            counting.let_go.set()
            status, answer = asked.result()
        assert (status, "took longer than 0.8 seconds" in answer["error"]) == (503, True)
        assert counting.computed == BATCH


def test_the_memory_forgets_what_was_not_used_for_longest() -> None:
    memory = FeatureMemory(100)
    rows = np.arange(60, dtype=np.float32).reshape(6, 10)  # 40 bytes each
    for place in range(2):
        memory.put(bytes([place]), rows[place])
    assert memory.get(b"\0") is not None
    memory.put(b"\2", rows[2])
    assert memory.get(b"\1") is None
    found = memory.get(b"\0")
    assert found is not None and found.base is None
    np.testing.assert_array_equal(found, rows[0])
    memory.put(b"\2", rows[3])  # the same again takes no more room
    np.testing.assert_array_equal(memory.get(b"\2"), rows[3])
    assert memory.get(b"\0") is not None
    memory.put(b"\3", np.zeros(1000, np.float32))  # too large for it
    assert all(memory.get(bytes([place])) is None for place in range(4))


@pytest.mark.parametrize(
    ("pictures", "size", "at_once"), [(300, 84, 16), (300, 224, 16), (300, 260, 16), (1000, 224, 6), (300, 1024, 1)]
)
def test_large_pictures_mean_fewer_requests_at_once(pictures: int, size: int, at_once: int) -> None:
    limits = Limits(pictures=pictures).for_pictures_of(3 * size**2)
    assert limits.at_once == at_once
    assert at_once == 1 or at_once * pictures * 3 * size**2 <= limits.held_bytes


@pytest.mark.slow
def test_pictures_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the command itself: pictures of 2 x 45 MB leave neither files nor much memory."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("TRIDENT_CACHE", str(tmp_path / "cache"))

    def asked(first: int) -> list[File]:
        return [(f"{i}.bmp", picture((90, i % 250, 40), i, 224, "BMP")) for i in range(first, first + 290)]

    with command(tmp_path, "--backbone", NAME) as server:
        about = json.loads(server.get("/api/about")[2])["weights"][0]
        assert (about["name"], about["size"]) == (NAME, 32)
        assert server.ask(three_classes(), asked(0), more=with_tab(TAB))[0] == 200
        before = server.memory()
        for number in range(1, 3):
            assert server.ask(three_classes(), asked(290 * number), more=with_tab(TAB))[0] == 200
        assert server.memory() - before < 25
        assert list(tmp_path.iterdir()) == []


def test_weights_for_features_of_one_conv4_get_it_back(tmp_path: Path) -> None:
    whole = load_checkpoint("glyphs-simpleshot")
    save_checkpoint(tmp_path / "reduced.safetensors", without_conv4(whole, "weights:glyphs-simpleshot"))
    _, found = WeightStore(str(tmp_path / "reduced.safetensors")).fitting(3, 3)
    assert found.recipe.backbone == whole.recipe.backbone
    assert found.parameters.keys() == whole.parameters.keys()


def test_mistakes_are_told_in_one_line(trident_here: Callable[..., Answer]) -> None:
    assert_one_line_error(trident_here("web", "--port", "0", "--backbone", "resnet"), "no backbone is called 'resnet'")
    both = trident_here("web", "--port", "0", "--backbone", DEFAULT, "--weights", "mini-5w1s-set")
    assert_one_line_error(both, "have a backbone of their own", DEFAULT)
    on_features = trident_here("web", "--port", "0", "--weights", "features-trident")
    assert_one_line_error(on_features, "features-trident classify stored features", f"give the backbone {DEFAULT}")
