"""`trident web` over HTTP: a real server, asked as any client may ask it, also one that means no good."""

import base64
import io
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from conftest import Trident_command, assert_one_line_error
from trident.checkpoint import load_checkpoint
from trident.data.images import ImageFile, decode
from trident.labelling import Labelled, Labeller, label_pile, read_labelled
from trident.pictures import HeldImage
from trident.web.limits import Limits
from trident.web.shelf import Shelf
from web_server import COLOURS, Site, body_of, bomb, command, picture, site, three_classes, tiny_weights, until

SMALL = Limits(classes=4, labelled=8, pictures=12, file_bytes=50_000, request_bytes=200_000, pixels=40_000)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def plain(weights: Path) -> Iterator[Site]:
    with site(weights) as running:
        yield running


@pytest.fixture(scope="module")
def narrow(weights: Path) -> Iterator[Site]:
    """With small limits."""
    with site(weights, SMALL) as running:
        yield running


def pile(n: int) -> list[tuple[str, bytes]]:
    colours = list(COLOURS.items())
    return [(f"{colours[i % 3][0]} {i}.png", picture(colours[i % 3][1], 100 + i)) for i in range(n)]


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
    expected = label_pile(Labeller(load_checkpoint(weights), *read_labelled(files, 16, 3)), of_pile)
    assert answer["classes"] == list(labelled)
    assert [one["name"] for one in answer["pile"]] == [name for name, _ in asked]
    for place, one in enumerate(answer["pile"]):
        names, shares = zip(*expected.ranking(place), strict=True)
        assert tuple(name for name, _ in one["ranking"]) == names
        np.testing.assert_allclose([share for _, share in one["ranking"]], shares, atol=1e-6)
    assert answer["weights"]["name"] == "tiny"
    assert answer["weights"]["described"] == load_checkpoint(weights).described()
    assert str(weights.parent) not in json.dumps(answer)


def test_bad_pictures_name_themselves_and_spoil_nothing(plain: Site) -> None:
    labelled = three_classes()
    good = plain.ask(labelled, pile(4))[1]
    labelled["green"].append(("notes.jpg", b"this is no picture"))
    slow = picture(COLOURS["red"], 0, kind="JPEG").replace(b"\xff\xd9", b"\xff\xda" * 200 + b"\xff\xd9")
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


def four(n: int) -> dict[str, list[tuple[str, bytes]]]:
    """Some classes with one picture each."""
    return {f"class {i}": [(f"{i}.png", picture((60 * i, 90, 90), i))] for i in range(n)}


@pytest.mark.parametrize(
    ("labelled", "asked", "more", "status", "words"),
    [
        (three_classes(), pile(7), [], 413, "more than 12 pictures"),
        (four(3) | {"more": pile(6)}, pile(1), [], 413, "more than 8 labelled pictures"),
        (four(5), pile(1), [], 413, "more than 4 classes"),
        (four(1), pile(1), [], 422, "at least 2 classes"),
        (four(2), [], [], 422, "no picture to label"),
        (four(2) | {"none": []}, pile(1), [], 422, "class 'none' has no labelled picture"),
        (four(2) | {"  class  0 ": pile(1)}, pile(1), [], 422, "two classes 'class 0'"),
        (four(2) | {" ": pile(1)}, pile(1), [], 422, "1 to 80 letters"),
        (four(2) | {"x" * 81: pile(1)}, pile(1), [], 422, "1 to 80 letters"),
        (four(2) | {"x" * 5000: pile(1)}, pile(1), [], 422, "1 to 80 letters"),
        (four(2), pile(1), [("labelled-9", pile(1)[0])], 422, "a class that has no name"),
        (four(2), pile(1), [("extra", pile(1)[0])], 422, "'extra' is no field"),
        (four(2), pile(1) + [("big.bmp", bytes(45_000))] * 5, [], 413, "more than 0.2 MB in one request"),
    ],
)
def test_requests_that_are_turned_down(
    narrow: Site, labelled: Any, asked: Any, more: Sequence[Any], status: int, words: str
) -> None:
    found, answer = narrow.ask(labelled, asked, more=more)
    assert (found, words in answer["error"]) == (status, True), answer
    assert "\n" not in answer["error"]
    assert narrow.ask(three_classes(), pile(3))[0] == 200


def test_a_body_that_does_not_tell_its_length_is_counted_as_it_comes(narrow: Site) -> None:
    """It would never end; the answer comes all the same."""
    body, kind = body_of(four(2), pile(1))
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield (
            body[: body.rindex(b"--a-line")]
            + b'--a-line-that-no-picture-holds\r\nContent-Disposition: form-data; name="pile"'
        )
        yield b'; filename="long.jpg"\r\n\r\n'
        while sent < 3_000_000:
            sent += 10_000
            yield bytes(10_000)

    status, _, answer = narrow.send("POST", "/api/label", endless(), {"Content-Type": kind})
    assert status == 413
    assert "in one request" in json.loads(answer)["error"]


def test_a_length_over_the_limit_is_answered_before_the_body_comes(narrow: Site) -> None:
    with socket.create_connection((urlsplit(narrow.address).hostname, urlsplit(narrow.address).port), 30) as raw:
        raw.sendall(
            b"POST /api/label HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
            b"Content-Length: 9000000000\r\n\r\n"
        )
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{}", "application/json", 415),
        (b"", "", 415),
        (b"", "multipart/form-data", 415),
        (b"no boundary here", "multipart/form-data; boundary=x", 400),
        (b"", "multipart/form-data; boundary=x", 400),
        (body_of(four(2), pile(1))[0][:-40], body_of({}, [])[1], 400),
        (b"--x\r\n\r\n\r\n--x--\r\n", "multipart/form-data; boundary=x", 422),
        (b"", f"multipart/form-data; boundary={'x' * 5000}", 400),
    ],
)
def test_bodies_that_cannot_be_read(plain: Site, body: bytes, kind: str, status: int) -> None:
    found, _, answer = plain.send("POST", "/api/label", body, {"Content-Type": kind})
    assert (found, "error" in json.loads(answer)) == (status, True), answer


def test_big_files_are_named_and_the_rest_is_done(narrow: Site) -> None:
    many_pixels = io.BytesIO()
    Image.new("RGB", (250, 250)).save(many_pixels, "PNG")
    asked = [*pile(2), ("heavy.bmp", bytes(60_000)), ("wide.png", many_pixels.getvalue())]
    status, answer = narrow.ask(three_classes(), asked)
    assert status == 200
    assert [one["error"] is None for one in answer["pile"]] == [True, True, False, False]
    assert answer["pile"][2]["error"] == "heavy.bmp: it has more than 0.05 MB: shrink it first"
    assert answer["pile"][3]["error"].startswith("wide.png: it has more than 40,000 pixels")


class Slow:
    """In place of labelling: goes on until it is told to stop, or let go."""

    def __init__(self) -> None:
        self.started, self.ended, self.let_go = 0, 0, threading.Event()
        self.order: list[str] = []

    def __call__(self, labeller: Labeller, pile: Sequence[Any], progress: Callable[[int, int], None]) -> Labelled:
        self.started += 1
        self.order.append(labeller.classes[0])
        try:
            while not self.let_go.wait(0.01):
                progress(0, 1)
            return Labelled(labeller.classes, np.full((len(pile), len(labeller.classes)), 0.5))
        finally:
            self.ended += 1


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    found = Slow()
    monkeypatch.setattr("trident.web.labels.label_pile", found)
    yield found
    found.let_go.set()


def test_what_takes_too_long_is_stopped(weights: Path, slow: Slow) -> None:
    with site(weights, Limits(seconds=0.3)) as running:
        began = time.monotonic()
        status, answer = running.ask(four(2), pile(1))
        assert (status, "took longer than 0.3 seconds" in answer["error"]) == (503, True)
        assert time.monotonic() - began < 5
        assert slow.ended == 1
        slow.let_go.set()
        assert running.ask(four(2), pile(1))[0] == 200


def test_a_server_that_is_stopped_tells_those_who_wait(weights: Path, slow: Slow) -> None:
    with ThreadPoolExecutor(1) as clients:
        with site(weights) as running:
            asked = clients.submit(running.ask, four(2), pile(1))
            assert until(lambda: slow.started == 1)
        status, answer = asked.result()
        assert (status, "being stopped" in answer["error"]) == (503, True)
        assert slow.ended == 1


def test_sending_too_slowly_is_stopped(weights: Path) -> None:
    with site(weights, Limits(upload_seconds=0.3)) as running, closing(running.connection()) as connection:
        connection.putrequest("POST", "/api/label")
        connection.putheader("Content-Type", "multipart/form-data; boundary=x")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b"--x\r\n")
        answer = connection.getresponse()
        assert answer.status == 408
        assert "took longer than 0.3 seconds" in json.loads(answer.read())["error"]


def test_requests_wait_their_turn_and_not_too_many_of_them(weights: Path, slow: Slow) -> None:
    with site(weights, Limits(at_once=3)) as running, ThreadPoolExecutor(4) as clients:
        waiting = []
        for number in range(3):
            labelled = {f"first of {number}": pile(1), "other": pile(1)}
            waiting.append(clients.submit(running.ask, labelled, pile(1)))
            assert until(lambda: slow.started == 1)
            time.sleep(0.3)  # so that it is known who came when
        status, answer = running.ask(four(2), pile(1))
        assert (status, "too many others" in answer["error"]) == (503, True)
        assert running.get("/api/about")[0] == 200  # the server itself is not held up
        slow.let_go.set()
        assert [one.result()[0] for one in waiting] == [200] * 3
        assert slow.order == [f"first of {number}" for number in range(3)]
        assert running.ask(four(2), pile(1))[0] == 200


def test_nobody_is_worked_for_who_has_left(weights: Path, slow: Slow) -> None:
    body, kind = body_of(four(2), pile(1))
    with site(weights) as running:
        leaving = [running.connection() for _ in range(2)]
        for connection in leaving:
            connection.request("POST", "/api/label", body, {"Content-Type": kind})
        assert until(lambda: slow.started == 1)
        for connection in leaving:
            connection.close()
        assert until(lambda: slow.ended == 1)
        slow.let_go.set()
        assert running.ask(four(2), pile(1))[0] == 200
        assert slow.started == 2  # the one that had left before its turn was not begun


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost@evil.example", "[::1"]
)
def test_other_names_are_not_answered_to(plain: Site, host: str) -> None:
    for method, path in (("GET", "/"), ("GET", "/api/about"), ("POST", "/api/label")):
        assert plain.send(method, path, None, {"Host": host})[0] in (400, 403), (method, path)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1:99", "[::1]:8000", "192.168.1.5"])
def test_own_names_and_addresses_are_answered_to(plain: Site, host: str) -> None:
    assert plain.get("/api/about", Host=host)[0] == 200


def test_a_name_can_be_allowed(weights: Path) -> None:
    with site(weights, names=["pictures.example"]) as running:
        assert running.get("/", Host="pictures.example")[0] == 200
        assert running.get("/", Host="other.example")[0] == 403


def test_pages_of_other_sites_can_send_nothing(plain: Site) -> None:
    own = plain.address.rstrip("/")
    for headers, status in (
        ({"Origin": own}, 200),
        ({"Origin": own, "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ):
        assert plain.ask(four(2), pile(1), headers=headers)[0] == status, headers


def test_every_answer_has_security_headers_and_only_the_page_is_served(plain: Site) -> None:
    for path in ("/", "/page.js", "/api/about", "/nothing"):
        _, headers, _ = plain.get(path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers
    for path in ("/docs", "/openapi.json", "/redoc", "/../app.py", "/..%2fapp.py", "/%2e%2e/app.py", "/app.py"):
        assert plain.get(path)[0] == 404, path
    _, headers, page = plain.get("/")
    assert b"http://" not in page and b"https://" not in page
    assert plain.get("/api/label")[0] in (404, 405)


def test_what_is_not_there_is_told_as_other_errors_are(plain: Site) -> None:
    for path in ("/api/label", "/nowhere.js"):
        status, _, answer = plain.get(path)
        assert status in (404, 405)
        assert "error" in json.loads(answer)


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
        assert running.ask(four(2), pile(1))[0] == 200
        status, answer = running.ask(four(2), pile(1), "/api/look")
        assert (status, "no latents" in answer["error"]) == (422, True)


def test_weights_suit_the_number_of_examples() -> None:
    shelf = Shelf("auto")
    assert [shelf.fitting(n, 3)[0] for n in (3, 6, 7, 60)] == ["mini-5w1s-set"] * 2 + ["mini-5w5s-set"] * 2
    for name, about in zip(("mini-5w1s-set", "mini-5w5s-set"), shelf.described(), strict=True):
        assert (about["name"], about["size"], about["comes_along"]) == (name, 84, True)
        assert "trained on mini-imagenet" in about["described"]


def test_the_page_is_told_of_weights_and_limits(plain: Site) -> None:
    about = json.loads(plain.get("/api/about")[2])
    assert about["limits"]["pictures"] == Limits().pictures
    assert about["weights"][0]["name"] == "tiny"


def test_every_limit_that_can_be_given_is_kept_to(weights: Path, tmp_path: Path) -> None:
    given = ("--pictures", "7", "--megabytes", "2", "--request-megabytes", "3", "--megapixels", "4", "--seconds", "5")
    with command(tmp_path, "--weights", str(weights), *given) as server:
        limits = json.loads(server.get("/api/about")[2])["limits"]
    expected = {"pictures": 7, "file_bytes": 2_000_000, "request_bytes": 3_000_000, "pixels": 4_000_000, "seconds": 5}
    assert {name: limits[name] for name in expected} == expected


def test_many_at_once_are_kept_apart_and_leave_nothing_behind(weights: Path, tmp_path: Path) -> None:
    """200 requests of 8 clients and a decompression bomb, at the command itself: answers, memory and files."""
    checkpoint = load_checkpoint(weights)

    def request(number: int) -> tuple[dict[str, Any], list[Any]]:
        """Everything is its own; pictures are big, so that it shows if they are kept."""
        colours = [(int(r), int(g), int(b)) for r, g, b in np.random.default_rng(number).integers(20, 230, (7, 3))]
        sent = [(f"{number}-{i}.bmp", picture(colour, i, 200, "BMP")) for i, colour in enumerate(colours)]
        return {f"visitor {number} {letter}": [sent[i]] for i, letter in enumerate("abc")}, sent[3:]

    def pixels(content: bytes) -> np.ndarray:
        return decode(HeldImage("", Image.open(io.BytesIO(content))), 16, 3)

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


def test_mistakes_are_told_in_one_line(trident: Trident_command, tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "fastapi.py").write_text("raise ImportError")
    missing = trident("web", env={"PYTHONPATH": str(tmp_path / "without")})
    assert_one_line_error(missing, "trident web needs the web extra: pip install 'trident[web]'")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_one_line_error(trident("web", "--port", port), f"port {port}", "in use", "--port")
    assert_one_line_error(trident("web", "--host", "nowhere.invalid"), "nowhere.invalid")
    assert_one_line_error(trident("web", "--host", "."), "--host .")
    assert_one_line_error(trident("web", "--megabytes", "inf"), "--megabytes")
    assert_one_line_error(trident("web", "--port", "0", "--weights", "nothing"), "nothing", "trident weights")
