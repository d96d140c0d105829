"""`trident web` and pictures that are made to take long: others are served, and the server can be stopped."""

import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from hostile_pictures import many_scans, tiles_of_the_same_data
from web_server import Command, Site, body_of, command, four, picture, pile, three_classes, until

SECONDS_TO_STOP = 10


@pytest.fixture(scope="module")
def slow() -> bytes:
    """As many scans as are allowed, of many pixels."""
    return many_scans(90)


@pytest.fixture
def server(weights: Path, tmp_path: Path) -> Iterator[Command]:
    with command(tmp_path, "--weights", str(weights)) as running:
        yield running


@pytest.mark.slow
def test_others_are_served_while_hostile_pictures_are_refused(server: Command, slow: bytes) -> None:
    """Four visitors send nothing but such pictures. Others do not wait until the server is done with them."""
    stop = threading.Event()
    bad = [(f"{kind}.jpg", content) for kind, content in (("slow", slow), ("tiles", tiles_of_the_same_data()))]

    def ask_for_bad() -> list[str]:
        status, answer = server.ask(four(2), [*bad, *pile(1)])
        assert status == 200, answer
        assert answer["pile"][2]["ranking"]
        return [one["error"] or "" for one in answer["pile"][:2]]

    def attack(number: int) -> list[str]:
        found: list[str] = []
        while not stop.is_set():
            found += ask_for_bad()
        return found

    ask_for_bad()  # the server's first request takes longer
    began = time.monotonic()
    ask_for_bad()
    alone = time.monotonic() - began  # one of the four, on this machine with what else it does

    with ThreadPoolExecutor(4) as attackers:
        attacks = [attackers.submit(attack, number) for number in range(4)]
        try:
            time.sleep(1)
            took = []
            for _ in range(2):
                began = time.monotonic()
                status, answer = server.ask(three_classes(), pile(3))
                took.append(time.monotonic() - began)
                assert (status, [bool(one["ranking"]) for one in answer["pile"]]) == (200, [True] * 3)
        finally:
            stop.set()
        errors = [one for attack in attacks for one in attack.result()]
    assert max(took) < 2.5 * alone, (took, alone)  # one after another, the four take four times as long
    assert len(errors) >= 4
    for one in errors:
        assert one == "" or "took too long" in one or "far more pixels" in one
    assert server.memory("VmHWM") < 700


def in_flight(server: Site, slow: bytes) -> list[Any]:
    """Functions that send a request each: one that is decoded, one that is labelled, and one that is half sent."""

    def ask(pictures: list[tuple[str, bytes]]) -> int:
        return server.ask(three_classes(), pictures)[0]

    many = pile(200)

    def half() -> int:
        body, kind = body_of(four(2), pile(1))
        with closing(http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=30)) as connection:
            connection.putrequest("POST", "/api/label")
            connection.putheader("Content-Type", kind)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body[: len(body) // 2])
            return connection.getresponse().status

    return [lambda: ask([("slow.jpg", slow)] * 20), lambda: ask([("slow.jpg", slow)] * 2), lambda: ask(many), half]


def stopped(weights: Path, folder: Path, slow: bytes, number: signal.Signals, wait: float) -> tuple[list[int], float]:
    """The answers to requests in flight, and the seconds until the server ended."""
    with command(folder, "--weights", str(weights)) as server:
        works = in_flight(server, slow)
        with ThreadPoolExecutor(len(works)) as clients:
            asked = [clients.submit(work) for work in works]
            assert until(lambda: queue_length(server) == len(works))
            time.sleep(wait)
            server.process.send_signal(number)
            began = time.monotonic()
            code = server.process.wait(60)
            seconds = time.monotonic() - began
            answers = [one.result() for one in asked]
        assert code == (130 if number == signal.SIGINT else 0)
        assert server.process.stderr is not None
        assert "Traceback" not in server.process.stderr.read()
    return answers, seconds


def queue_length(server: Site) -> int:
    lines = server.get("/metrics")[2].decode().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("trident_queue_length "))


@pytest.mark.slow
def test_it_can_be_stopped_whatever_it_is_doing(weights: Path, tmp_path: Path, slow: bytes) -> None:
    answers, seconds = stopped(weights, tmp_path, slow, signal.SIGINT, 0.5)
    assert seconds < SECONDS_TO_STOP
    assert set(answers) <= {200, 503} and answers.count(503) >= 2, answers


@pytest.mark.soak
def test_twenty_stops(weights: Path, tmp_path: Path, slow: bytes) -> None:
    for place in range(20):
        number = (signal.SIGINT, signal.SIGTERM)[place % 2]
        answers, seconds = stopped(weights, tmp_path, slow, number, 0.1 * place)
        print(number.name, answers, round(seconds, 1))
        assert seconds < SECONDS_TO_STOP
        assert set(answers) <= {200, 503} and answers.count(503) >= 1, answers


def test_a_picture_without_a_file_name_is_read(plain: Site) -> None:
    red = picture((200, 40, 30), 7, side=400, kind="BMP")  # more bytes than a text may have
    status, answer = plain.ask(three_classes(), pile(1), more=[("pile", (None, red)), ("pile", (None, b"x" * 2000))])
    assert status == 200
    assert answer["pile"][1]["error"] is None and answer["pile"][1]["ranking"][0][0] == "red"
    assert answer["pile"][2]["error"] == "a picture without a name: it is not an image in a known format"


def test_malformed_bodies_are_answered_and_not_logged(server: Command) -> None:
    for body in (b"no boundary here", b"--x\r\n\xff\xfe\x1b[31m: a\r\n", b"--x\r\nContent-Disposition form\r\n\r\n"):
        status, _, answer = server.send("POST", "/api/label", body, {"Content-Type": "multipart/form-data; boundary=x"})
        assert (status, "error" in json.loads(answer)) == (400, True)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(SECONDS_TO_STOP) == 130
    assert server.process.stderr is not None
    assert server.process.stderr.read() == ""


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("localhost", False)])
def test_who_lets_other_machines_in_is_warned(weights: Path, tmp_path: Path, host: str, warned: bool) -> None:
    with command(tmp_path, "--weights", str(weights), "--host", host, token="a-token-for-the-tests") as server:
        server.process.send_signal(signal.SIGTERM)
        said = server.process.communicate(timeout=20)[1]
    assert said.count("\n") == int(warned)
    assert ("trident: warning: --host 0.0.0.0 lets other machines connect" in said) == warned
