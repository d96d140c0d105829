"""The page with a token in a browser, and `trident web` behind a real nginx with the documented configuration."""

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from web_backbone import NAME
from web_server import COLOURS, Command, Site, body_of, command, pile, site, three_classes, until
from web_visit import copies, fill_in, label, shown, visit

pytestmark = pytest.mark.slow  # real servers, nginx and a browser

TOKEN = "a-token-for-the-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
DEPLOY = Path(__file__).parents[2] / "docs" / "deploy.md"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_the_page_with_a_token_in_a_browser(browser: Any, weights: Path) -> None:
    with site(weights, token=TOKEN) as running, visit(browser, running.address, f"?token={TOKEN}") as page:
        assert page.url == running.address
        assert page.evaluate("document.cookie") == ""  # scripts cannot read it
        fill_in(page, copies(1))
        label(page)
        assert [said for _, said, _ in shown(page)] == list(COLOURS)

        elsewhere = page.context.new_page()  # a link on another site, such as a mail that was sent to everyone
        link = f'<a href="{running.address}?token={TOKEN}">label pictures</a>'
        elsewhere.route("http://mail.example/", lambda route: route.fulfill(body=link, content_type="text/html"))
        page.context.clear_cookies()
        elsewhere.goto("http://mail.example/")
        elsewhere.click("a")
        elsewhere.wait_for_selector(".class")
        assert elsewhere.url == running.address
        elsewhere.reload()
        elsewhere.wait_for_selector(".class")
        page.context.clear_cookies()
        assert elsewhere.reload().status == 401
        assert "the token is missing" in elsewhere.inner_text("body")


@dataclass(frozen=True)
class Proxy(Site):
    """nginx before two replicas."""

    replicas: list[Command]
    folder: Path
    plain_port: int

    def connection(self, source: str = "127.0.0.3") -> http.client.HTTPConnection:
        port = urlsplit(self.address).port
        context = ssl._create_unverified_context()
        return http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context, source_address=(source, 0))


@contextlib.contextmanager
def nginx(folder: Path, ports: list[int], secure: int, plain: int) -> Iterator[None]:
    """With the configuration of docs/deploy.md, but for ports and paths."""
    text = re.findall(r"```nginx\n(.*?)```", DEPLOY.read_text("utf-8"), re.DOTALL)[0]
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=labels.example.org"]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    temporary = [f"{kind}_temp_path {folder / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    for documented, here in (
        ("listen 80;", f"listen 127.0.0.1:{plain};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{secure} ssl;"),
        ("server 127.0.0.1:8001;", f"server 127.0.0.1:{ports[0]};"),
        ("server 127.0.0.1:8002;", f"server 127.0.0.1:{ports[1]};"),
        ("/etc/nginx/labels.example.org.pem", str(certificate)),
        ("/etc/nginx/labels.example.org.key", str(key)),
        ("/var/log/nginx/access.log", str(folder / "access.log")),
        ("worker_processes auto;", "worker_processes 1;"),
        ("http {", "http {\n" + "\n".join(temporary)),  # the usual places belong to the system's nginx
    ):
        assert text.count(documented) == 1, documented
        text = text.replace(documented, here)
    (folder / "nginx.conf").write_text(text)
    arguments = ["nginx", "-p", str(folder), "-c", "nginx.conf", "-e", "error.log", "-g", "daemon off; pid pid;"]
    with subprocess.Popen(arguments, stderr=subprocess.DEVNULL) as process:
        try:
            assert until(lambda: answers(secure)), (folder / "error.log").read_text()
            yield
        finally:
            process.terminate()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    if shutil.which("nginx") is None or shutil.which("openssl") is None:
        pytest.skip("there is no nginx here (or no openssl): the documented configuration is not tried")
    folder = tmp_path_factory.mktemp("nginx")
    folder.chmod(0o755)  # nginx' workers may run as another user
    ports, secure, plain = [free_port(), free_port()], free_port(), free_port()
    options = ("--backbone", NAME, "--proxy", "127.0.0.1", "--public-name", "labels.example.org")
    with contextlib.ExitStack() as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=os.pathsep)  # for the backbone
        starting = [
            started.enter_context(command(folder, *options, "--port", str(port), wait=False, token=TOKEN))
            for port in ports
        ]
        started.enter_context(nginx(folder, ports, secure, plain))
        replicas = [Command(first_word(one.process), one.process) for one in starting]
        yield Proxy(f"https://127.0.0.1:{secure}/", replicas, folder, plain)


def first_word(process: subprocess.Popen[str]) -> str:
    """The address, when the server is ready."""
    assert process.stdout is not None
    return process.stdout.readline().split()[0]


def labelled_by(server: Site) -> int:
    """Requests that a replica has labelled, by its own metrics."""
    text = server.get("/metrics")[2].decode()
    found = re.search(r'^trident_requests_total\{kind="label",status="200"\} (\d+)$', text, re.MULTILINE)
    return int(found[1]) if found else 0


def test_two_replicas_behind_nginx(proxy: Proxy) -> None:
    name = {"Host": "labels.example.org"}
    assert proxy.get("/", **name)[0] == 401
    assert proxy.get("/", **name, **BEARER)[0] == 200
    assert proxy.get("/", Host="evil.example", **BEARER)[0] == 403
    assert proxy.get("/health", **name)[0] == 200
    assert proxy.get("/metrics", **name, **BEARER)[0] == 404
    status, headers, _ = proxy.get(f"/?token={TOKEN}", **name)
    assert status == 200 and "Secure" in headers["set-cookie"]
    status, headers, _ = Site(f"http://127.0.0.1:{proxy.plain_port}").get(f"/?token={TOKEN}", **name)
    assert (status, headers["location"]) == (301, "https://labels.example.org/")
    assert "/ 200" in (log := (proxy.folder / "access.log").read_text()) and TOKEN not in log

    before = [labelled_by(one) for one in proxy.replicas]
    tab = [("tab", (None, b"0123456789abcdef" * 2))]
    said = [proxy.ask(three_classes(), pile(6), more=tab, headers=name | BEARER) for _ in range(6)]
    assert [status for status, _ in said] == [200] * 6
    assert all(answer == said[0][1] for _, answer in said)  # whichever replica, and with or without known features
    after = [labelled_by(one) for one in proxy.replicas]
    assert sum(after) - sum(before) == 6
    assert all(now > earlier for now, earlier in zip(after, before, strict=True)), (before, after)
    origin = {"Origin": "https://labels.example.org", "Sec-Fetch-Site": "same-origin"}
    assert proxy.ask(three_classes(), pile(1), headers=name | BEARER | origin)[0] == 200
    assert proxy.ask(three_classes(), pile(1), headers=name | BEARER | {"Origin": "https://evil.example"})[0] == 403


def test_a_visit_through_nginx(proxy: Proxy, browser: Any) -> None:
    with visit(browser, proxy.address, f"?token={TOKEN}") as page:
        assert page.url == proxy.address
        fill_in(page, copies(1))
        label(page)
        assert [said for _, said, _ in shown(page)] == list(COLOURS)


def test_idle_and_slow_clients_of_nginx_do_not_stop_others(proxy: Proxy) -> None:
    """The slow ones go through to the replicas, which tell clients apart by the address that nginx forwards."""
    with contextlib.ExitStack() as held:
        for _ in range(400):
            held.enter_context(
                socket.create_connection(("127.0.0.1", urlsplit(proxy.address).port), 20, ("127.0.0.4", 0))
            )
        for _ in range(12):
            slow = held.enter_context(contextlib.closing(proxy.connection("127.0.0.4")))
            slow.putrequest("POST", "/api/label")
            slow.putheader("Content-Type", "multipart/form-data; boundary=x")
            slow.putheader("Content-Length", "100000")
            slow.putheader("Authorization", BEARER["Authorization"])
            slow.endheaders(b"--x\r\n")
        assert until(lambda: sum(queue_length(one) for one in proxy.replicas) == 8)
        assert proxy.ask(three_classes(), pile(1), headers=BEARER)[0] == 200
        body, kind = body_of(three_classes(), pile(1))
        with contextlib.closing(proxy.connection("127.0.0.4")) as same:
            same.request("POST", "/api/label", body, {"Content-Type": kind, **BEARER})
            answer = same.getresponse()
            assert (answer.status, "4 requests open" in json.loads(answer.read())["error"]) == (429, True)
    assert until(lambda: sum(queue_length(one) for one in proxy.replicas) == 0)


def queue_length(server: Site) -> int:
    found = re.search(r"^trident_queue_length (\d+)$", server.get("/metrics")[2].decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_a_replica_that_dies_is_replaced_by_the_other(proxy: Proxy) -> None:
    """The last test of this file: the replica does not come back."""
    proxy.replicas[0].process.kill()
    proxy.replicas[0].process.wait(10)
    assert [proxy.ask(three_classes(), pile(1), headers=BEARER)[0] for _ in range(5)] == [200] * 5
