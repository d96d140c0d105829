"""Who `trident web` answers to, and how it keeps other sites out."""

import json
from pathlib import Path

import pytest

from web_server import (
    Site,
    four,
    pile,
    site,
)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost@evil.example", "[::1"),
        *("evil.example@localhost", "localhost#evil.example", "localhost/evil.example", "localhost:99999"),
    ],
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
        ({"Origin": own.replace("http:", "https:")}, 403),
        ({"Origin": own.replace("http:", "chrome-extension:")}, 403),
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
