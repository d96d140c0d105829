"""`trident web` as a service: the token beyond localhost, health, metrics, and what one client can hold up."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ablation_grids import Answer
from commands import assert_one_line_error
from trident.web import serve
from trident.web.limits import Limits
from trident.web.serve import client_of
from trident.web.service import COOKIE
from web_server import Command, Site, body_of, command, four, pile, site, until

TOKEN = "a-token-for-the-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def service(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Listens on all addresses; a proxy at 127.0.0.9 is believed."""
    options = ("--host", "0.0.0.0", "--weights", str(weights), "--proxy", "127.0.0.9")
    with command(tmp_path_factory.mktemp("service"), *options, token=TOKEN) as running:
        yield running


def connect(server: Site, source: str) -> socket.socket:
    """A connection from one local address to another one."""
    return socket.create_connection(("127.0.0.2", urlsplit(server.address).port), 20, (source, 0))


def send(
    server: Site, path: str, source: str = "127.0.0.3", method: str = "GET", body: Any = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    port = urlsplit(server.address).port
    connection = http.client.HTTPConnection("127.0.0.2", port, timeout=20, source_address=(source, 0))
    with contextlib.closing(connection):
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def ask(server: Site, source: str = "127.0.0.3", **headers: str) -> tuple[int, Any]:
    body, kind = body_of(four(2), pile(1))
    status, _, answer = send(server, "/api/label", source, "POST", body, Content_Type=kind, **headers)
    return status, json.loads(answer)


def test_beyond_localhost_nothing_is_answered_without_the_token(service: Command) -> None:
    assert TOKEN not in service.address  # a given token is not printed
    for path in ("/", "/page.js", "/api/about", "/nothing", "/?token=", "/?token=wrong", "/api/about?token=" + TOKEN):
        status, headers, answer = send(service, path)
        assert (status, headers["www-authenticate"]) == (401, "Bearer"), path
        assert json.loads(answer)["error"].startswith("the token is "), path
        assert "set-cookie" not in headers
    assert ask(service)[0] == 401
    for wrong in ("Bearer wrong", "Bearer " + TOKEN[:-1], f"Bearer {TOKEN}x", "Basic " + TOKEN, "Bearer \xe9"):
        assert send(service, "/", Authorization=wrong)[0] == 401, wrong
    assert send(service, "/", Cookie=f"{COOKIE}=wrong")[0] == 401
    assert send(service, "/", **BEARER)[0] == 200
    assert ask(service, **BEARER)[0] == 200
    assert send(service, "/", **BEARER, Host="evil.example")[0] == 403  # the other guards are still there


def test_the_token_in_the_address_becomes_a_cookie(service: Command) -> None:
    status, headers, page = send(service, f"/?token={TOKEN}")
    assert status == 200 and TOKEN not in page.decode()
    cookie = headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}={TOKEN};")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert "Secure" not in cookie
    assert send(service, "/page.js", Cookie=cookie.split(";")[0])[0] == 200
    forwarded = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.1"}
    assert "Secure" in send(service, f"/?token={TOKEN}", "127.0.0.9", **forwarded)[1]["set-cookie"]
    assert "Secure" not in send(service, f"/?token={TOKEN}", "127.0.0.8", **forwarded)[1]["set-cookie"]  # not believed


def samples(text: str) -> dict[str, float]:
    """Reads the text format as Prometheus does: every sample has a type, and its labels are quoted."""
    found, types = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            types[name] = kind
        elif not line.startswith("# HELP "):
            parsed = re.fullmatch(r'([a-z_]+)(\{[a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*\})? (\S+)', line)
            assert parsed is not None, line
            family = re.sub("_(bucket|sum|count)$", "", parsed[1])
            assert types.get(parsed[1]) in ("counter", "gauge") or types[family] == "histogram", line
            found[parsed[1] + (parsed[2] or "")] = float(parsed[3])
    return found


def test_health_and_metrics(service: Command) -> None:
    status, _, answer = send(service, "/health")
    assert (status, json.loads(answer)) == (200, {"status": "ready"})
    before = samples(send(service, "/metrics")[2].decode())
    assert ask(service, **BEARER)[0] == 200
    assert ask(service)[0] == 401
    status, headers, answer = send(service, "/metrics")  # 127.0.0.3 is this machine
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    now = samples(answer.decode())

    def more(name: str) -> float:
        return now[name] - before.get(name, 0)

    assert more('trident_requests_total{kind="label",status="200"}') == 1
    assert more('trident_requests_total{kind="label",status="401"}') == 1
    assert more("trident_pictures_labelled_total") == 1
    assert more('trident_request_seconds_count{kind="label"}') == 2
    buckets = [value for name, value in now.items() if name.startswith('trident_request_seconds_bucket{kind="label"')]
    assert buckets == sorted(buckets) and buckets[-1] == now['trident_request_seconds_count{kind="label"}']
    assert 0 < now['trident_request_seconds_sum{kind="label"}'] < 100
    assert now["trident_queue_length"] == 0
    assert now["process_resident_memory_bytes"] == pytest.approx(service.memory() * 1_024_000, rel=0.2)
    assert "class 0" not in answer.decode() and ".png" not in answer.decode()
    # A proxy on this machine passes on requests from elsewhere.
    for source, header in (
        ("127.0.0.9", "X-Forwarded-For"),
        ("127.0.0.3", "X-Forwarded-For"),
        ("127.0.0.3", "Forwarded"),
    ):
        assert send(service, "/metrics", source, **{header: "192.0.2.1"})[0] == 401
        assert send(service, "/metrics", source, **{header: "192.0.2.1"}, **BEARER)[0] == 200


def slow_body(server: Site, source: str, headers: Mapping[str, str]) -> socket.socket:
    """A connection on which the body of a request has only begun."""
    raw = connect(server, source)
    lines = ["POST /api/label HTTP/1.1", "Host: 127.0.0.2", "Content-Length: 100000"]
    lines += ["Content-Type: multipart/form-data; boundary=x", *(f"{key}: {value}" for key, value in headers.items())]
    raw.sendall("\r\n".join([*lines, "", "--x", ""]).encode())
    return raw


def queue_length(server: Site) -> float:
    return samples(send(server, "/metrics")[2].decode())["trident_queue_length"]


def test_idle_and_slow_clients_do_not_stop_others(service: Command) -> None:
    """400 connections that send nothing, and 50 of each kind that send a byte a second, all from one address."""
    with contextlib.ExitStack() as held:
        patient = held.enter_context(connect(service, "127.0.0.6"))
        slow = [held.enter_context(slow_body(service, "127.0.0.4", one)) for one in (BEARER, {}) for _ in range(50)]
        for _ in range(50):
            slow.append(held.enter_context(connect(service, "127.0.0.4")))
            slow[-1].sendall(b"GET / HTTP/1.1\r\n")
        assert until(lambda: queue_length(service) == 4)  # what one client may have
        status, answer = ask(service, "127.0.0.4", **BEARER)
        assert (status, answer["error"]) == (429, "your address has 4 requests open: wait for their answers")
        for _ in range(400):
            held.enter_context(connect(service, "127.0.0.4"))
        patient.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.2\r\n\r\n")
        assert patient.recv(100).startswith(b"HTTP/1.1 200 ")  # it waited longest, but others have more connections
        for _ in range(3):
            for one in slow:
                with contextlib.suppress(OSError):  # the server may have closed it
                    one.sendall(b"a")
            began = time.monotonic()
            assert send(service, "/health")[0] == 200
            assert send(service, "/", **BEARER)[0] == 200
            status, answer = ask(service, **BEARER)
            assert (status, len(answer.get("pile", []))) == (200, 1), answer
            assert time.monotonic() - began < 5
            time.sleep(0.5)
    assert until(lambda: queue_length(service) == 0)


def test_behind_a_proxy_clients_are_told_apart_by_the_forwarded_address(service: Command) -> None:
    with contextlib.ExitStack() as held:
        for source, client in (("127.0.0.9", "192.0.2.1"), ("127.0.0.5", "192.0.2.2")):
            before = queue_length(service)
            for _ in range(4):
                held.enter_context(slow_body(service, source, {"X-Forwarded-For": client, **BEARER}))
            assert until(lambda: queue_length(service) == before + 4)  # noqa: B023
        assert ask(service, "127.0.0.9", X_Forwarded_For="192.0.2.1", **BEARER)[0] == 429
        assert (
            ask(service, "127.0.0.9", X_Forwarded_For="8.8.8.8, 192.0.2.1", **BEARER)[0] == 429
        )  # made up by the client
        assert ask(service, "127.0.0.9", X_Forwarded_For="192.0.2.2", **BEARER)[0] == 200
        assert ask(service, "127.0.0.5", X_Forwarded_For="192.0.2.3", **BEARER)[0] == 429  # no proxy: its own address
    assert until(lambda: queue_length(service) == 0)


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("unknown", "unknown"),
    ],
)
def test_whom_an_address_belongs_to(address: str, client: str) -> None:
    assert client_of(address) == client


def test_a_connection_that_waits_too_long_is_closed(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that sends a byte now and then; not one whose answer takes its time."""
    monkeypatch.setattr(serve, "HEADER_SECONDS", 0.6)
    with site(weights, Limits(grace_seconds=1.5)) as running:
        place = urlsplit(running.address)
        with socket.create_connection((place.hostname, place.port), 10) as raw:
            began = time.monotonic()
            with contextlib.suppress(OSError):
                for letter in b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: ...":
                    raw.sendall(bytes([letter]))
                    time.sleep(0.05)
                    if time.monotonic() - began > 0.8:
                        break
            with contextlib.suppress(ConnectionResetError):
                assert raw.recv(100) == b""
            assert time.monotonic() - began < 5
        with contextlib.closing(running.connection()) as connection:
            connection.putrequest("POST", "/api/label")
            connection.putheader("Content-Type", "multipart/form-data; boundary=x")
            connection.putheader("Content-Length", "1000")
            connection.endheaders(b"--x\r\n")
            answer = connection.getresponse()  # after the grace of 1.5 s
            assert (answer.status, json.loads(answer.read())["error"]) == (
                408,
                "the pictures arrive at less than 10 kB a second: too slow",
            )


def test_who_does_not_read_the_answer_is_closed(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "READ_SECONDS", 0.3)
    monkeypatch.setattr(serve, "HEADER_SECONDS", 0.3)
    with site(weights) as running:
        place = urlsplit(running.address)
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.settimeout(10)
            raw.connect((place.hostname, place.port))
            began = time.monotonic()
            with pytest.raises(ConnectionError):  # many requests at once, whose answers nobody reads
                while time.monotonic() - began < 8:
                    raw.sendall(b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
                    time.sleep(0.05)
        assert running.get("/")[0] == 200


def test_it_is_unhealthy_while_it_loads_and_while_it_stops(weights: Path, tmp_path: Path) -> None:
    """And without a given token it makes one. On localhost, requests wait for the network as they always did."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said: list[tuple[int, str]] = []

    def health(server: Site) -> str | None:
        try:
            status, _, answer = server.get("/health")
        except OSError:
            return None
        said.append((status, json.loads(answer)["status"]))
        return said[-1][1]

    options = ("--host", "0.0.0.0", "--weights", str(weights), "--port", str(port), "--drain", "30")
    early = Site(f"http://127.0.0.1:{port}")
    with command(tmp_path, *options, wait=False) as server:
        assert until(lambda: health(early) == "loading")
        assert server.process.stdout is not None
        address = server.process.stdout.readline().split()[0]
        assert health(early) == "ready"
        token = re.fullmatch(rf"http://0\.0\.0\.0:{port}/\?token=([\w-]{{43}})", address)
        assert token is not None, address
        assert early.get("/")[0] == 401
        assert early.get("/", Authorization=f"Bearer {token[1]}")[0] == 200
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: health(early) == "stopping")
        assert early.get("/", Authorization=f"Bearer {token[1]}")[0] == 200  # it still answers
        server.process.send_signal(signal.SIGTERM)  # once more: it does not wait any longer
        assert server.process.wait(10) == 0
    assert set(said) == {(503, "loading"), (200, "ready"), (503, "stopping")}


def test_on_localhost_no_token_is_needed(plain: Site) -> None:
    assert plain.get("/")[0] == plain.get("/metrics")[0] == plain.get("/health")[0] == 200


def test_mistakes_are_told_in_one_line(
    trident_here: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*options: object) -> Any:
        return trident_here("web", "--port", 0, *options)

    short = tmp_path / "short"
    short.write_text("secret\n")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff" * 40)
    assert_one_line_error(wrong("--token-file", short), "--token-file", "16 to 200 characters")
    assert_one_line_error(wrong("--token-file", binary), "--token-file", "not a text file")
    assert_one_line_error(wrong("--token-file", tmp_path / "none"), "--token-file", "No such file")
    assert_one_line_error(wrong("--proxy", "*"), "--proxy *", "IP address or network")
    assert_one_line_error(wrong("--proxy", "10.0.0.1/8"), "--proxy 10.0.0.1/8", "host bits")
    assert_one_line_error(wrong("--per-client", "0"), "--per-client")
    monkeypatch.setitem(os.environ, "TRIDENT_TOKEN", "spaces are not allowed here")
    assert_one_line_error(wrong(), "TRIDENT_TOKEN", "16 to 200 characters")
