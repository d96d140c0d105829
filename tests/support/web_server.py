"""What the tests of `trident web` share: tiny weights, pictures, a running server, requests as clients send them."""

import http.client
import io
import json
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from tiny import TINY_BACKBONE, TINY_METHOD, TINY_RECIPE
from trident.learning.checkpoint import Checkpoint, save_checkpoint
from trident.web.app import make_routes
from trident.web.limits import Limits
from trident.web.networks import Network, WeightStore
from trident.web.serve import address_of, listen, make_server
from trident.web.service import Service

File = tuple[str, bytes]
COLOURS = {"red": (200, 40, 30), "green": (30, 160, 60), "blue": (40, 60, 190)}


def tiny_weights(folder: Path) -> Path:
    """Untrained, but with prototypes, and so able to tell colours apart; pictures of 16x16."""
    method = replace(TINY_METHOD, attfex="set", attfex_residual=True, classifier_start="prototypes", inner_steps=0)
    recipe = replace(TINY_RECIPE, backbone=replace(TINY_BACKBONE, image_channels=3), method=method)
    path = folder / "tiny.safetensors"
    save_checkpoint(path, Checkpoint(recipe, recipe.initial(0), recipe.model.initial_running(), 0))
    return path


def picture(colour: tuple[int, int, int], seed: int, side: int = 24, kind: str = "PNG") -> bytes:
    """A coarse pattern in shades of one colour."""
    shades = np.random.default_rng(seed).uniform(0.7, 1.1, (4, 4, 1)) * np.array(colour)
    image = Image.fromarray(shades.clip(0, 255).astype(np.uint8)).resize((side, side), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def three_classes() -> dict[str, list[File]]:
    return {name: [(f"{name}-{seed}.png", picture(rgb, seed)) for seed in range(2)] for name, rgb in COLOURS.items()}


def pile(n: int) -> list[File]:
    colours = list(COLOURS.items())
    return [(f"{colours[i % 3][0]} {i}.png", picture(colours[i % 3][1], 100 + i)) for i in range(n)]


def four(n: int) -> dict[str, list[File]]:
    """Some classes with one picture each."""
    return {f"class {i}": [(f"{i}.png", picture((60 * i, 90, 90), i))] for i in range(n)}


def bomb(side: int = 30_000) -> bytes:
    """A whole PNG of so many pixels, black, in a hundred kilobytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4)

    header = side.to_bytes(4) * 2 + bytes([1, 0, 0, 0, 0])  # one bit, grey
    packer = zlib.compressobj(9)
    row = bytes(1 + -(-side // 8))
    rows = b"".join([*(packer.compress(row * 1000) for _ in range(side // 1000)), packer.flush()])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def body_of(
    labelled: Mapping[str, Sequence[File]],
    pile: Sequence[File],
    more: Sequence[tuple[str, tuple[str | None, bytes]]] = (),
) -> tuple[bytes, str]:
    """A multipart body and its content type."""
    boundary = "a-line-that-no-picture-holds"
    parts: list[bytes] = []

    def add(field: str, content: bytes, filename: str | None = None) -> None:
        said = f'form-data; name="{field}"' + ("" if filename is None else f'; filename="{filename}"')
        parts.append(f"--{boundary}\r\nContent-Disposition: {said}\r\n\r\n".encode() + content + b"\r\n")

    for name in labelled:
        add("class", name.encode())
    for place, files in enumerate(labelled.values()):
        for name, content in files:
            add(f"labelled-{place}", content, name)
    for name, content in pile:
        add("pile", content, name)
    for field, (filename, content) in more:
        add(field, content, filename)
    return b"".join([*parts, f"--{boundary}--\r\n".encode()]), f"multipart/form-data; boundary={boundary}"


@dataclass(frozen=True)
class Site:
    """A running server, as a client sees it."""

    address: str

    def connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.address)
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        return self.send("GET", path, None, headers)

    def send(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        connection = self.connection()
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def ask(
        self,
        labelled: Mapping[str, Sequence[File]],
        pile: Sequence[File],
        path: str = "/api/label",
        more: Sequence[tuple[str, tuple[str | None, bytes]]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        body, kind = body_of(labelled, pile, more)
        status, _, answer = self.send("POST", path, body, {"Content-Type": kind, **(headers or {})})
        return status, json.loads(answer)


@contextmanager
def site(
    network: Path | Network, limits: Limits | None = None, names: Sequence[str] = (), token: str | None = None
) -> Iterator[Site]:
    """A server in a thread of this process; a path is that of weights."""
    loaded = WeightStore(str(network)) if isinstance(network, Path) else network
    with listen("127.0.0.1", 0) as listening:
        service = Service(names, token)
        service.routes = make_routes(loaded, limits or Limits(), service.metrics)
        server = make_server(service)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Site(address_of(listening))
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@dataclass(frozen=True)
class Command(Site):
    """`trident web`, run as a user would."""

    process: subprocess.Popen[str]

    def memory(self, line: str = "VmRSS") -> float:
        """In MB; VmRSS now, VmHWM at most so far."""
        text = Path(f"/proc/{self.process.pid}/status").read_text("utf-8")
        return next(int(row.split()[1]) for row in text.splitlines() if row.startswith(line)) / 1000


@contextmanager
def command(folder: Path, *options: str, wait: bool = True, token: str | None = None) -> Iterator[Command]:
    """The command in a folder that also serves for temporary files; its address is known if it is waited for."""
    environment = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    environment |= {} if token is None else {"TRIDENT_TOKEN": token}
    arguments = [sys.executable, "-m", "trident", "web", "--port", "0", *options]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, cwd=folder, env=environment, **pipes) as process:
        assert process.stdout is not None
        try:
            yield Command(process.stdout.readline().split()[0] if wait else "", process)
        finally:
            process.terminate()


def until(what: Any, seconds: float = 10) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
