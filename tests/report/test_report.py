"""Reports and comparisons, made by the command and opened in a real browser."""

import fcntl
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import assert_one_line_error, run_here
from trident.learning.checkpoint import load_checkpoint, save_checkpoint

SMALL = [
    "training.steps=4",
    "tasks_per_step=1",
    "validation_tasks=2",
    "validate_every=2",
    "log_every=1",
    "backbone.channels=4",
]
TRIDENT = [*SMALL, "method.label_latents=6"]
PROTONET = """
summary = "letters, a Prototypical Network"
dataset = "glyphs"
[episode]
n_query = 5
[backbone]
image_size = 28
image_channels = 1
[method]
name = "protonet"
"""


pytestmark = pytest.mark.slow  # a report measures a run in every way that there is


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str, no_umap: None) -> Path:
    """A folder with two small runs and the report of the first, made once for all test processes."""
    root = tmp_path_factory.getbasetemp()
    folder = (root if worker_id == "master" else root.parent) / "report"
    with (folder.parent / "report.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "report.json").is_file():
            folder.mkdir(exist_ok=True)
            for name, seed in (("one", 0), ("two", 1)):
                trained = run_here(folder, "train", "glyphs", "--out", name, *TRIDENT, f"training.seed={seed}")
                assert trained.returncode == 0, trained.stderr
            result = run_here(folder, "report", "one", "--tasks", "4", "--audit-tasks", "2", "--json")
            assert result.returncode == 0, result.stderr
            (folder / "report.json").write_text(result.stdout, "utf-8")
    return folder


def test_a_report_says_what_the_parts_say(folder: Path) -> None:
    report = json.loads((folder / "report.json").read_text("utf-8"))
    assert report["page"] == "one/report.html"
    alone = json.loads(run_here(folder, "evaluate", "one", "--tasks", "4", "--json").stdout)
    assert report["accuracy"] == pytest.approx(alone["accuracy"])
    calibrated = run_here(
        folder, "evaluate", "one", "--also", "calibration", "--tasks", "4", "--temperature-tasks", "2", "--json"
    )
    assert report["with_temperature"] == json.loads(calibrated.stdout)["with_temperature"]
    audited = json.loads(run_here(folder, "evaluate", "one", "--also", "audit", "--tasks", "2", "--json").stdout)
    assert report["audit"] == audited["audit"]
    page = (folder / "one" / "report.html").read_text("utf-8")
    for text in (
        f"{report['accuracy']:.2f}",
        report["protocol"]["fingerprint"],
        "shuffled queries, balanced",
        "the very predictions that are scored",
        "other tasks of the classes that are scored",
        "these classes chose the weights",
        "Davies-Bouldin",
        "training.tasks_per_step",
        "semantic_encoder",
    ):
        assert text in page, text


class _Links(HTMLParser):
    """What a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            loads = name in ("src", "href", "xlink:href", "srcset", "data")
            if loads and value and not value.startswith(("data:", "#")):
                self.found.append(f"{tag} {name}={value}")


def test_a_report_loads_nothing(folder: Path) -> None:
    page = (folder / "one" / "report.html").read_text("utf-8")
    parser = _Links()
    parser.feed(page)
    assert parser.found == []
    assert "@import" not in page and "url(http" not in page
    assert "mathdefault" not in page and "\\math" not in page  # no TeX where a number should stand
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "figures of one page must not share ids"


OVERFLOWING = """() => [...document.querySelectorAll('body *')]
    .filter(e => !e.closest('svg') || e.tagName.toLowerCase() === 'svg')
    .filter(e => {
        const box = e.getBoundingClientRect();
        const inline = getComputedStyle(e).display === 'inline';
        const cut = e.clientWidth > 0 && !inline && e.scrollWidth > e.clientWidth + 1;
        return box.right > window.innerWidth + 1 || box.left < -1 || cut;
    })
    .map(e => e.tagName + ' ' + e.textContent.trim().slice(0, 60))"""
OUTSIDE_ITS_FIGURE = """() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
    const frame = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(t => {
        const box = t.getBoundingClientRect();
        return box.left < frame.left - 2 || box.right > frame.right + 2;
    }).map(t => t.textContent);
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 768, 1400])
def test_a_report_looks_right_in_a_browser(folder: Path, browser: Any, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    try:
        page.goto((folder / "one" / "report.html").resolve().as_uri())
        page.locator("summary").click()  # the settings, which are folded up at first
        assert page.locator("figure svg").count() == 4
        assert page.locator("figure img").count() == 2
        for place in range(4):
            box = page.locator("figure svg").nth(place).bounding_box()
            assert box["width"] > 250 and box["height"] > 150
        loaded = page.evaluate("() => [...document.images].map(image => image.complete && image.naturalWidth > 0)")
        assert loaded == [True, True]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OVERFLOWING) == []
        assert page.evaluate(OUTSIDE_ITS_FIGURE) == []
        back, ink = page.evaluate("() => ['backgroundColor', 'color'].map(key => getComputedStyle(document.body)[key])")
        brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (back, ink)]
        assert (brightness[0] > brightness[1]) == (scheme == "light")
        text = page.evaluate("() => getComputedStyle(document.querySelector('figure svg text')).fill")
        assert text == ink, "the figures' text takes the page's colour"
        assert complaints == []
        assert all(url.startswith(("file:", "data:")) for url in requests)
    finally:
        page.close()


def test_runs_side_by_side(folder: Path) -> None:
    result = run_here(folder, "compare", "one", "two", "one/last.safetensors", "--tasks", "6", "--json")
    assert result.returncode == 0, result.stderr
    compared = json.loads(result.stdout)
    first, second, last = compared["runs"]
    assert (first["name"], second["name"], last["name"]) == ("one/best.safetensors", "two", "one/last.safetensors")
    assert first["protocol"]["split"] == "val"  # choosing between runs is not what test classes are for
    assert first["difference"] is None
    assert second["difference"]["points"] == pytest.approx(second["accuracy"] - first["accuracy"])
    assert compared["differing_settings"] == {"training.seed": [0, 1, 0]}


def test_a_comparison_in_a_browser(folder: Path, browser: Any, tmp_path: Path) -> None:
    """With a name that HTML and matplotlib might take for something else, and a log with foreign lines."""
    odd = tmp_path / "<b>$\\bad$ & a rather long name of a run, longer than a narrow screen is wide"
    shutil.copytree(folder / "two", odd)
    with (odd / "log.jsonl").open("a") as log:
        log.write('5\n{"a": 1}\n{"kind": "validation", "step": 9}\n{"kind": "tra')
    result = run_here(tmp_path, "compare", folder / "one", odd, "--tasks", "2", "--out", "both.html")
    assert result.returncode == 0, result.stderr
    page = browser.new_page(viewport={"width": 400, "height": 800})
    page.goto((tmp_path / "both.html").resolve().as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate(OVERFLOWING) == []
    assert page.locator("main b").count() == 0
    assert "$\\bad$" in page.inner_text("main")
    page.close()


def test_other_kinds_of_runs_have_reports_too(folder: Path, tmp_path: Path) -> None:
    """Sorted training, three ways, one query of each class, weights alone (no log, no latents to score) that blow up
    under one protocol."""
    few = ["n_way=3", "n_query=1", "query_order=class_sorted", "attfex=off"]
    assert run_here(tmp_path, "train", "glyphs", "--out", "run", *TRIDENT, *few).returncode == 0
    trained = load_checkpoint(tmp_path / "run")
    running = {key: torch.full_like(value, torch.inf) for key, value in trained.running.items()}
    save_checkpoint(tmp_path / "weights.safetensors", replace(trained, running=running))
    result = run_here(tmp_path, "report", "weights.safetensors", "--tasks", "2", "--audit-tasks", "2", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["decoupling"] is None
    assert report["protocol"]["query_order"] == "shuffled"
    assert report["page"] == "weights-report.html"
    page = (tmp_path / "weights-report.html").read_text("utf-8")
    assert "There is no log beside these weights" in page
    assert "is open" in page  # two tasks are too few for a verdict
    assert "no result: val task 0" in page


def test_a_method_without_latents_has_a_report_without_them(tmp_path: Path) -> None:
    (tmp_path / "protonet.toml").write_text(PROTONET)
    assert run_here(tmp_path, "train", "protonet.toml", "--out", "run", *SMALL).returncode == 0
    result = run_here(tmp_path, "report", "run", "--tasks", "4", "--audit-tasks", "2", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["decoupling"] is None
    assert not [row["name"] for row in report["audit"]["rows"] if "sample" in row["name"]]
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings[:2] == ["Learning curves", "Accuracy under each protocol"]
    assert not [heading for heading in headings if "atent" in heading or "decoder" in heading]
    assert (page.count("<svg"), page.count("<img")) == (3, 0)
    assert "z_label" not in page and "Davies-Bouldin" not in page


def test_mistakes_are_told_in_one_line(folder: Path) -> None:
    before = sorted(path.name for path in folder.rglob("*"))
    for words, expected in (
        (["report", "nothing"], "nothing"),
        (["report", "one", "--out", "no/such/folder.html"], "no/such"),
        (["report", "one", "--data", "no.store"], "no.store"),
        (["compare", "one"], "at least two runs"),
        (["compare", "one", "nothing"], "nothing"),
        (["compare", "one", "two", "--out", "no/such/page.html"], "no/such"),
        (["report", "one", "--out", "two"], "not an ordinary file"),
        (["evaluate", "one", "--also", "audit", "protocol.query_order=class_sorted"], "omit settings of the protocol"),
        (["evaluate", "one", "backbone.channels=8"], "backbone.channels cannot be changed once a model is trained"),
        (["evaluate", "one", "method.label_latents=8"], "settings of episode, protocol and views can be"),
        (["evaluate", "one", "episode.n_query=3"], "tied to positions"),
        (["evaluate", "one", "--temperature", "best"], "best"),
        (["evaluate", "one", "--also", "decoupling", "--out", "figure.doc"], "must end with one of"),
    ):
        assert_one_line_error(run_here(folder, *words), expected)
    assert sorted(path.name for path in folder.rglob("*")) == before
