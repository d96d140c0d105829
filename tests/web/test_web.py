"""`trident web` over HTTP: a real server, and what it answers."""

import base64
import io
import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from commands import assert_one_line_error
from trident.data.images import ImageFile, ImageInMemory, Target
from trident.labelling.labeller import Labeller, read_labelled
from trident.labelling.tables import mark_of
from trident.learning.checkpoint import load_checkpoint
from trident.web.limits import Limits
from trident.web.networks import WeightStore
from web_server import (
    COLOURS,
    Site,
    bomb,
    command,
    picture,
    pile,
    site,
    three_classes,
)


def test_the_answer_is_the_librarys(plain: Site, weights: Path, tmp_path: Path) -> None:
    """Classes of unequal size, names in other scripts and in HTML, pictures of several kinds and sizes."""
    labelled = three_classes() | {"<b>猫</b> & co": [("a.jpg", picture((200, 200, 40), 7, 60, "JPEG"))]}
    labelled["red"] = labelled["red"][:1]
    asked = [*pile(5), ("größer; \\ name.webp", picture((190, 190, 50), 8, 50, "WEBP"))]
    status, answer = plain.ask(labelled, asked)
    assert status == 200, answer
    files: dict[str, list[ImageFile]] = {}
    for place, (name, sent) in enumerate([*labelled.items(), ("the pile", asked)]):
        for number, (_, content) in enumerate(sent):
            path = tmp_path / f"{place}-{number}"
            path.write_bytes(content)
            files.setdefault(name, []).append(ImageFile(path))
    of_pile = files.pop("the pile")
    expected = Labeller(load_checkpoint(weights), *read_labelled(files, 16, 3)).label(of_pile)
    assert answer["classes"] == list(labelled)
    assert [one["name"] for one in answer["pile"]] == [name for name, _ in asked]
    for place, one in enumerate(answer["pile"]):
        assert one["picture"] == mark_of(of_pile[place])
        names, shares = zip(*expected.ranking(place), strict=True)
        assert tuple(name for name, _ in one["ranking"]) == names
        np.testing.assert_allclose([share for _, share in one["ranking"]], shares, atol=1e-6)
    assert answer["weights"]["name"] == "tiny"
    assert answer["weights"]["described"] == load_checkpoint(weights).describe()
    assert str(weights.parent) not in json.dumps(answer)


def test_bad_pictures_name_themselves_and_spoil_nothing(plain: Site) -> None:
    labelled = three_classes()
    good = plain.ask(labelled, pile(4))[1]
    labelled["green"].append(("notes.jpg", b"this is no picture"))
    slow = picture(COLOURS["red"], 0, kind="JPEG").replace(
        b"\xff\xd9", b"\xff\xda\0\x08\1\1\0\0\0\0" * 200 + b"\xff\xd9"
    )
    with_bad = [*pile(4), ("letter.jpg", b"Dear Sir"), ("empty.png", b""), ("half.png", pile(1)[0][1][:60])]
    with_bad += [("phone.heic", b"\0\0\0 ftypheic"), ("slow.jpg", slow)]
    status, answer = plain.ask(labelled, with_bad)
    assert status == 200
    assert answer["pile"][:4] == good["pile"]
    for one, name in zip(
        answer["pile"][4:], ("letter.jpg", "empty.png", "half.png", "phone.heic", "slow.jpg"), strict=True
    ):
        assert one["error"].startswith(f"{name}: ")
        assert one["ranking"] is None
    assert "HEIC pictures cannot be read here" in answer["pile"][7]["error"]
    assert "more than 100 scans" in answer["pile"][8]["error"]
    assert [one["name"] for one in answer["labelled"] if one["error"]] == ["notes.jpg"]
    status, answer = plain.ask(labelled, with_bad[4:])
    assert status == 200
    assert all(one["error"] for one in answer["pile"])


def test_a_class_without_a_readable_picture_is_an_error(plain: Site) -> None:
    labelled = three_classes() | {"grey": [("fog.jpg", b"fog")]}
    status, answer = plain.ask(labelled, pile(2))
    assert status == 422
    assert "class 'grey' has no picture that can be read" in answer["error"]
    assert "fog.jpg" in answer["error"]
    assert [one["name"] for one in answer["labelled"] if one["error"]] == ["fog.jpg"]


def test_for_the_curious(plain: Site) -> None:
    labelled = three_classes()
    labelled["red"].insert(0, ("bad.jpg", b"bad"))
    status, answer = plain.ask(labelled, [("bad.png", b""), *pile(4)], "/api/look")
    assert status == 200, answer
    whose = [(one["from"], one["place"]) for one in answer["pictures"]]
    assert whose == [("labelled", place) for place in range(1, 7)] + [("pile", place) for place in range(1, 5)]
    for one in answer["pictures"]:
        for key in ("seen", "painted"):
            content = base64.b64decode(one[key].removeprefix("data:image/jpeg;base64,"))
            assert Image.open(io.BytesIO(content)).size == (16, 16)
    seen = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["pictures"][0]["seen"].split(",")[1]))))
    assert seen.mean((0, 1)).argmax() == 0  # the first is red
    points = np.array([one["point"] for one in answer["pictures"]])
    assert np.isfinite(points).all() and points.std(0).min() > 0
    np.testing.assert_allclose(points.mean(0), 0, atol=1e-3)
    assert 0 < sum(answer["shares"]) <= 1.0001
    status, answer = plain.ask(labelled, [("bad.png", b"")], "/api/look")
    assert (status, "no picture in the pile" in answer["error"]) == (422, True)


def test_weights_without_latents_label_and_say_that_there_is_nothing_to_see() -> None:
    with site(Path("mini-5w1s-protonet")) as running:
        about = json.loads(running.get("/api/about")[2])["weights"]
        assert [(one["name"], one["latents"]) for one in about] == [("mini-5w1s-protonet", False)]
        status, answer = running.ask(three_classes(), pile(3))
        assert status == 200
        assert [one["ranking"][0][0] for one in answer["pile"]] == list(COLOURS)
        status, answer = running.ask(three_classes(), pile(3), "/api/look")
        assert status == 422
        assert answer == {"error": "Prototypical Networks has no latents and no decoder: there is nothing to look at"}


def test_weights_suit_the_number_of_examples() -> None:
    store = WeightStore("auto")
    assert [store.fitting(n, 3)[0] for n in (3, 6, 7, 60)] == ["mini-5w1s-set"] * 2 + ["mini-5w5s-set"] * 2
    for name, about in zip(("mini-5w1s-set", "mini-5w5s-set"), store.described(), strict=True):
        assert (about["name"], about["size"], about["included"]) == (name, 84, True)
        assert "trained on mini-imagenet" in about["described"]


def test_the_page_is_told_of_weights_and_limits(plain: Site) -> None:
    about = json.loads(plain.get("/api/about")[2])
    assert about["limits"]["pictures"] == Limits().pictures
    assert about["weights"][0]["name"] == "tiny"


@pytest.mark.soak
def test_many_at_once_are_kept_apart_and_leave_nothing_behind(weights: Path, tmp_path: Path) -> None:
    """200 requests of 8 clients and a decompression bomb, at the command itself: answers, memory and files."""
    checkpoint = load_checkpoint(weights)

    def request(number: int) -> tuple[dict[str, Any], list[Any]]:
        """Everything is its own; pictures are big, so that it shows if they are kept."""
        colours = [(int(r), int(g), int(b)) for r, g, b in np.random.default_rng(number).integers(20, 230, (7, 3))]
        sent = [(f"{number}-{i}.bmp", picture(colour, i, 200, "BMP")) for i, colour in enumerate(colours)]
        return {f"visitor {number} {letter}": [sent[i]] for i, letter in enumerate("abc")}, sent[3:]

    def pixels(content: bytes) -> np.ndarray:
        return Target(16, 3).decode(ImageInMemory("", Image.open(io.BytesIO(content))))

    def visit(server: Site, numbers: Sequence[int]) -> None:
        for number in numbers:
            labelled, asked = request(number)
            status, answer = server.ask(labelled, asked)
            assert status == 200, answer
            assert answer["classes"] == list(labelled)
            assert [one["name"] for one in answer["pile"]] == [name for name, _ in asked]
            assert [one["name"] for one in answer["labelled"]] == [name for [(name, _)] in labelled.values()]
            examples = np.stack([pixels(content) for [(_, content)] in labelled.values()])
            labeller = Labeller(checkpoint, tuple(labelled), examples, np.arange(3))
            expected = labeller.probabilities(np.stack([pixels(content) for _, content in asked]))
            for one, shares in zip(answer["pile"], expected, strict=True):
                np.testing.assert_allclose([dict(one["ranking"])[name] for name in labelled], shares, atol=1e-5)

    def visits(server: Site, numbers: range) -> None:
        with ThreadPoolExecutor(8) as clients:
            list(clients.map(lambda first: visit(server, numbers[first::8]), range(8)))

    with command(tmp_path, "--weights", str(weights)) as server:
        visits(server, range(1000, 1040))
        before, began = server.memory(), time.monotonic()
        visits(server, range(200))
        seconds, after = time.monotonic() - began, server.memory()
        print(f"200 requests in {seconds:.1f} s; memory {before:.0f} MB before, {after:.0f} MB after")
        assert after - before < 25  # together they have brought 168 MB of pictures

        began, most = time.monotonic(), server.memory("VmHWM")
        labelled = three_classes()
        labelled["red"].append(("bomb.png", bomb()))
        status, answer = server.ask(labelled, [*pile(2), ("bomb.png", bomb())])
        assert status == 200
        assert answer["pile"][2]["error"].startswith("bomb.png: it has more than 50,000,000 pixels")
        assert answer["labelled"][2]["error"] == answer["pile"][2]["error"]
        assert all(one["ranking"] for one in answer["pile"][:2])
        assert time.monotonic() - began < 10
        assert server.memory("VmHWM") - most < 30  # decoded it would be 100 MB at least
        assert list(tmp_path.iterdir()) == []
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 130
        assert server.process.stderr is not None
        assert server.process.stderr.read() == ""  # nor is anything logged about visitors


def test_mistakes_are_told_in_one_line(trident_here: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "starlette", None)
        missing = trident_here("web")
    assert_one_line_error(missing, "trident web needs the web extra: pip install 'trident-fewshot[web]'")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_one_line_error(trident_here("web", "--port", port), f"port {port}", "in use", "--port")
    assert_one_line_error(trident_here("web", "--host", "nowhere.invalid"), "nowhere.invalid")
    assert_one_line_error(trident_here("web", "--host", "."), "--host .")
    assert_one_line_error(trident_here("web", "--megabytes", "inf"), "--megabytes")
    assert_one_line_error(trident_here("web", "--port", "0", "--weights", "nothing"), "nothing", "trident weights")
