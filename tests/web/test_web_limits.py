"""What `trident web` turns down or stops, and how requests wait for their turn."""

import io
import json
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

from trident.labelling.labelled import Labelled
from trident.labelling.labeller import Labeller
from trident.web.limits import Limits
from web_server import (
    Site,
    body_of,
    command,
    four,
    pile,
    site,
    three_classes,
    until,
)

SMALL = Limits(classes=4, labelled=8, pictures=12, file_bytes=50_000, request_bytes=200_000, pixels=40_000)


@pytest.fixture(scope="module")
def narrow(weights: Path) -> Iterator[Site]:
    """With small limits."""
    with site(weights, SMALL) as running:
        yield running


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
        (four(2) | {" ": pile(1)}, pile(1), [], 422, "1 to 200 characters"),
        (four(2) | {"x" * 201: pile(1)}, pile(1), [], 422, "1 to 200 characters"),
        (four(2) | {"x" * 5000: pile(1)}, pile(1), [], 422, "1 to 200 characters"),
        (four(2) | {"None of_these": pile(1)}, pile(1), [], 422, "which means no class at all"),
        ({"caf\u00e9": pile(1), "cafe\u0301": pile(1)}, pile(1), [], 422, "two classes 'caf\u00e9'"),
        (four(2) | {"third": four(1)["class 0"]}, pile(1), [], 422, "0.png in class 'third' are the same picture"),
        (four(2), pile(1), [("labelled-9", pile(1)[0])], 422, "a class that has no name"),
        (four(2), pile(1), [("extra", pile(1)[0])], 422, "unknown field 'extra'"),
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
    monkeypatch.setattr("trident.labelling.labeller.Labeller.label", lambda *arguments: found(*arguments))
    yield found
    found.let_go.set()


def test_what_takes_too_long_is_stopped(weights: Path, slow: Slow) -> None:
    with site(weights, Limits(seconds=0.3)) as running:
        began = time.monotonic()
        status, answer = running.ask(four(2), pile(1))
        assert (status, "took longer than 0.3 seconds" in answer["error"]) == (503, True)
        assert time.monotonic() - began < 5
        assert until(lambda: slow.ended == 1)
        slow.let_go.set()
        assert running.ask(four(2), pile(1))[0] == 200


def test_a_server_that_is_stopped_tells_those_who_wait(weights: Path, slow: Slow) -> None:
    with ThreadPoolExecutor(1) as clients:
        with site(weights) as running:
            asked = clients.submit(running.ask, four(2), pile(1))
            assert until(lambda: slow.started == 1)
        status, answer = asked.result()
        assert (status, "being stopped" in answer["error"]) == (503, True)
        assert until(lambda: slow.ended == 1)


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
            labelled = {f"first of {number}": pile(1), "other": pile(2)[1:]}
            waiting.append(clients.submit(running.ask, labelled, pile(1)))
            assert until(lambda: slow.started == 1)
            time.sleep(0.3)  # so that it is known who came when
        status, answer = running.ask(four(2), pile(1))
        assert (status, "too many other visitors" in answer["error"]) == (503, True)
        assert running.get("/api/about")[0] == 200  # the server itself is not held up
        slow.let_go.set()
        assert [one.result()[0] for one in waiting] == [200] * 3
        assert slow.order == [f"first of {number}" for number in range(3)]
        assert running.ask(four(2), pile(1))[0] == 200


def test_nobody_is_worked_for_who_has_left(weights: Path, slow: Slow) -> None:
    body, kind = body_of(four(2), pile(1))
    with site(weights) as running:
        first, waiting = running.connection(), running.connection()
        first.request("POST", "/api/label", body, {"Content-Type": kind})
        assert until(lambda: slow.started == 1)
        waiting.request("POST", "/api/label", body, {"Content-Type": kind})
        waiting.close()
        first.close()
        assert until(lambda: slow.ended == 1)
        slow.let_go.set()
        assert running.ask(four(2), pile(1))[0] == 200
        assert slow.started == 2  # the one that had left before its turn was not begun


def test_every_limit_that_can_be_given_is_kept_to(weights: Path, tmp_path: Path) -> None:
    given = ("--pictures", "7", "--megabytes", "2", "--request-megabytes", "3", "--megapixels", "4", "--seconds", "5")
    with command(tmp_path, "--weights", str(weights), *given) as server:
        limits = json.loads(server.get("/api/about")[2])["limits"]
    expected = {"pictures": 7, "file_bytes": 2_000_000, "request_bytes": 3_000_000, "pixels": 4_000_000, "seconds": 5}
    assert {name: limits[name] for name in expected} == expected
