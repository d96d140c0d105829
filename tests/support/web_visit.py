"""What the tests of `trident web` in a browser share: a page, and what a visitor does there."""

import base64
import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from web_server import COLOURS, File, picture

DROP = """([selector, files]) => {
    const transfer = new DataTransfer();
    for (const [name, content] of files) {
        const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
        transfer.items.add(new File([bytes], name, {type: 'image/png'}));
    }
    const place = document.querySelector(selector);
    for (const kind of ['dragover', 'drop']) {
        place.dispatchEvent(new DragEvent(kind, {dataTransfer: transfer, bubbles: true, cancelable: true}));
    }
}"""

BESIDE_THE_PAGE = """() => [...document.querySelectorAll('body *')].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width > 0 && (box.right > window.innerWidth + 1 || box.left < -1);
}).map(e => e.tagName + ' ' + e.className)"""


@contextmanager
def visit(browser: Any, address: str, query: str = "") -> Iterator[Any]:
    """A new visitor's page, which must neither complain nor load anything from elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, ignore_https_errors=True)
    found = context.new_page()
    found.set_default_timeout(15_000)
    complaints: list[str] = []
    requests: list[str] = []
    found.on("console", lambda message: complaints.append(message.text))
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("request", lambda request: requests.append(request.url))
    found.goto(address + query)
    found.wait_for_selector(".class")
    yield found
    # A request that is turned down is logged by the browser itself.
    assert [text for text in complaints if "Failed to load resource" not in text] == []
    assert all(url.startswith((address, "data:", f"blob:{address}")) for url in requests)
    context.close()


def copies(n: int) -> list[File]:
    """Pictures for the pile that are the examples over again, so that there is no doubt what they are."""
    return [(f"{name} {i}.png", picture(rgb, 0)) for i in range(n) for name, rgb in COLOURS.items()]


def wait_until(page: Any, expression: str) -> None:
    """As `wait_for_function`, which the page's own security policy does not let evaluate anything."""
    for _ in range(500):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"{expression} does not come true")


def drop(page: Any, selector: str, files: Sequence[File]) -> None:
    page.evaluate(DROP, [selector, [[name, base64.b64encode(content).decode()] for name, content in files]])


def upload(files: Sequence[File]) -> list[dict[str, Any]]:
    return [{"name": name, "mimeType": "image/png", "buffer": content} for name, content in files]


def fill_in(page: Any, pile: Sequence[File]) -> None:
    """Three classes, one of them added; pictures are dropped or picked."""
    page.click("#add-class")
    for place, (name, rgb) in enumerate(COLOURS.items()):
        page.locator(".class-name").nth(place).fill(name)
        example = [(f"example of {name}.png", picture(rgb, 0))]
        if place == 0:
            page.locator(".class input[type=file]").nth(place).set_input_files(upload(example))
        else:
            drop(page, f".class:nth-child({place + 1})", example)
    drop(page, "#pile", pile)
    wait_until(page, f"document.querySelectorAll('.picture').length === {len(pile)}")


def label(page: Any) -> None:
    page.click("#go")
    page.wait_for_selector("#status:has-text('labelled')")


def shown(page: Any) -> list[tuple[str, str, str]]:
    """Name, label and how sure, of each picture of the pile in the order they stand in."""
    return [
        tuple(tile.locator(what).inner_text() for what in (".name", ".label", ".percent"))
        for tile in page.locator(".picture").all()
        if tile.locator(".verdict").is_visible()
    ]


def table(page: Any, tmp_path: Path) -> list[dict[str, str]]:
    with page.expect_download() as found:
        page.click("#download")
    assert found.value.suggested_filename == "labels.csv"
    found.value.save_as(tmp_path / "labels.csv")
    return list(csv.DictReader(io.StringIO((tmp_path / "labels.csv").read_text("utf-8"))))
