"""`trident web` in a real browser: a visit from the first class to the table, by mouse and by keyboard, and mishaps."""

import base64
import csv
import io
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from trident.labelling import label_pile
from trident.web.limits import Limits
from web_server import COLOURS, File, bomb, picture, site, tiny_weights

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: the page is not looked at")
LIMITS = Limits(file_bytes=2_000_000)
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


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with site(tiny_weights(tmp_path_factory.mktemp("weights")), LIMITS) as running:
        yield running.address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield running
        running.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A new visitor's page, which must neither complain nor load anything from elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = context.new_page()
    found.set_default_timeout(15_000)
    complaints: list[str] = []
    requests: list[str] = []
    found.on("console", lambda message: complaints.append(message.text))
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("request", lambda request: requests.append(request.url))
    found.goto(address)
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


def test_a_visit(page: Any, tmp_path: Path) -> None:
    assert page.locator("#go").is_disabled()
    odd = ('none of them, "really".png', picture((150, 150, 150), 5))
    fill_in(page, [*copies(2), odd])
    label(page)
    found = shown(page)
    assert len(found) == 7
    assert all(name.startswith(said) for name, said, _ in found[:6])
    for tile in page.locator(".picture").all():
        bar, frame = (tile.locator(what).bounding_box() for what in (".confidence div", ".confidence"))
        value = float(tile.locator(".confidence").get_attribute("aria-valuenow"))
        assert 100 * bar["width"] / frame["width"] == pytest.approx(value, abs=1)
    wait_until(page, "[...document.querySelectorAll('main img')].every(e => e.naturalWidth > 0)")

    page.select_option("#sort", "unsure")
    sure = [float(bar.get_attribute("aria-valuenow")) for bar in page.locator(".confidence").all()]
    assert sure == sorted(sure)
    page.select_option("#sort", "sure")
    sure = [float(bar.get_attribute("aria-valuenow")) for bar in page.locator(".confidence").all()]
    assert sure == sorted(sure, reverse=True)
    page.select_option("#sort", "added")
    assert [name for name, _, _ in shown(page)] == [name for name, _ in [*copies(2), odd]]
    before = {row["path"]: row for row in table(page, tmp_path)}
    assert len(before) == 7 and {row["said_by"] for row in before.values()} == {"model"}
    assert 0.3 < float(before["red 0.png"]["probability"]) <= 1

    wrong = next(name for name in COLOURS if name != before[odd[0]]["label"])
    page.locator(".picture").nth(6).locator(".correct").select_option(label=f"it is {wrong}")
    assert shown(page)[6] == (odd[0], wrong, "you said so")
    assert "label again" in page.inner_text("#status")
    with page.expect_response("**/api/label") as answered:
        label(page)
    answer = answered.value.json()
    examples = [one["class"] for one in answer["labelled"] if one["name"].startswith("none of them")]
    assert (examples, len(answer["labelled"]), len(answer["pile"])) == ([wrong], 4, 6)
    assert shown(page)[6] == (odd[0], wrong, "you said so")
    assert "1 from the pile" in page.locator(".class").nth(list(COLOURS).index(wrong)).inner_text()
    rows = table(page, tmp_path)
    assert [row["path"] for row in rows] == [name for name, _ in [*copies(2), odd]]
    assert [row["said_by"] for row in rows] == ["model"] * 6 + ["you"]
    assert rows[6]["label"] == wrong
    assert any(row["probability"] != before[row["path"]]["probability"] for row in rows[:6])  # it has learnt from it

    page.locator(".picture").nth(6).locator(".correct").select_option(label="take that back")
    assert shown(page)[6][2] != "you said so"


def test_mishaps(page: Any) -> None:
    """A letter that calls itself a picture, a bomb and a file that is too big name themselves; the rest is labelled."""
    page.click("#add-class")
    pile = [*copies(1), ("letter.jpg", b"Dear Sir"), ("bomb.png", bomb()), ("wide.png", bomb(8000))]
    pile.append(("big.bmp", bytes(2_100_000)))
    page.click("#classes .remove-class >> nth=2")
    fill_in(page, pile)
    page.locator(".class input[type=file]").nth(0).set_input_files(upload([("notes.png", b"not a picture")]))
    began = time.monotonic()
    label(page)
    assert time.monotonic() - began < 10
    assert [said for _, said, _ in shown(page)] == list(COLOURS)
    errors = {
        tile.locator(".name").inner_text(): tile.locator(".error").inner_text()
        for tile in page.locator(".picture").all()
    }
    assert errors["red 0.png"] == ""
    assert errors["letter.jpg"] == "letter.jpg: it is not an image in a known format"
    assert "bomb.png: it has more than 50,000,000 pixels" in errors["bomb.png"]
    assert "wide.png: it has more than 50,000,000 pixels" in errors["wide.png"]
    assert all(page.locator(".picture img").nth(place).is_hidden() for place in (4, 5))  # nor are they decoded here
    assert "big.bmp: it has 2.1 MB, more than 2 MB" in errors["big.bmp"]
    assert "notes.png: it is not an image" in page.locator(".class").nth(0).inner_text()
    assert "3 pictures labelled" in page.inner_text("#status")
    # What is known to be unreadable is not sent again; a class that has nothing else says so.
    page.locator(".class").nth(0).get_by_label("Remove example of red.png").click()
    assert "“red” has no picture that can be read yet" in page.inner_text("#status")
    assert page.locator("#go").is_disabled()


def test_five_hundred_files_at_once(page: Any) -> None:
    small = picture((200, 30, 30), 0, 4)
    fill_in(page, [])
    page.set_input_files("#pile-files", upload([(f"{i}.png", small) for i in range(500)]))
    page.wait_for_selector("#problem:visible")
    assert page.inner_text("#problem-text") == "300 pictures are the limit: 203 of these 500 were left out."
    assert page.locator(".picture").count() == 297
    label(page)
    assert len(page.locator(".verdict:visible").all()) == 297
    page.click("#empty-pile")
    assert page.locator(".picture").count() == 0


def test_by_keyboard_alone(page: Any) -> None:
    def tab_to(what: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("what => document.activeElement.matches(what)", what):
                break
        assert page.evaluate("what => document.activeElement.matches(what)", what), what
        ring = page.evaluate(
            "() => getComputedStyle(document.activeElement.matches('.add input') ? "
            "document.activeElement.nextElementSibling : document.activeElement).outlineStyle"
        )
        assert ring != "none", f"one must see that {what} has the focus"

    choosers: list[Any] = []
    page.on(
        "filechooser", lambda chooser: choosers.append(chooser)
    )  # from the start: the browser takes a while to hand them over

    def choose(files: Sequence[File]) -> None:
        before = len(choosers)
        page.keyboard.press("Enter")
        for _ in range(500):
            if len(choosers) > before:
                break
            page.wait_for_timeout(20)
        choosers[before].set_files(upload(files))

    page.evaluate("document.activeElement.blur()")
    tab_to("#add-class")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.matches('.class:nth-child(3) .class-name')")
    page.keyboard.type("third")
    page.focus("#add-class")
    for place, rgb in enumerate(COLOURS.values()):
        tab_to(f".class:nth-child({place + 1}) .add input")
        choose([(f"{place}.png", picture(rgb, 0))])
    tab_to("#pile-files")
    choose(copies(1))
    tab_to("#go")
    page.keyboard.press("Enter")
    page.wait_for_selector("#status:has-text('3 pictures labelled')")
    page.focus("#download")
    tab_to(".correct")
    page.keyboard.press("ArrowDown")
    assert shown(page)[0][2] == "you said so"
    tab_to("#go")
    page.keyboard.press("Space")
    page.wait_for_selector("#status:has-text('2 pictures labelled')")
    page.focus("#pile-files")
    page.keyboard.press("Shift+Tab")
    page.focus(".picture .remove >> nth=1")
    page.keyboard.press("Enter")
    assert page.locator(".picture").count() == 2
    assert page.evaluate("document.activeElement.closest('.picture') !== null")  # the focus is not lost


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (400, "dark"), (768, "light"), (1280, "dark")])
def test_it_looks_right(page: Any, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    long = [(f"{'a rather long name ' * 6}.png", picture(COLOURS["red"], 1)), ("bad.png", b"bad")]
    fill_in(page, [*copies(1), *long])
    page.locator(".class-name").nth(1).fill(
        "a class whose name is as long as one may make it, and no longer than that, so"
    )
    label(page)
    page.click("#curious summary")
    page.click("#look")
    page.wait_for_selector(".plot")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(BESIDE_THE_PAGE) == []
    assert page.locator(".plot path").count() == 3 + 4
    assert page.locator(".paintings figure").count() == 3 + 4
    wait_until(page, "[...document.querySelectorAll('.paintings img')].every(e => e.naturalWidth > 0)")
    assert page.locator(".legend li").count() == 3
    back, ink = page.evaluate("() => ['backgroundColor', 'color'].map(key => getComputedStyle(document.body)[key])")
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (back, ink)]
    assert (brightness[0] > brightness[1]) == (scheme == "light")
    assert "trained on" in page.inner_text("#weights")


def test_names_are_text(page: Any) -> None:
    nasty = "<img src=x onerror=window.caught=1>"
    fill_in(page, [(f"{nasty}.png", picture(COLOURS["red"], 0)), (f"2{nasty}.png", b"bad")])
    page.locator(".class-name").nth(0).fill(nasty)
    label(page)
    assert [name for name, _, _ in shown(page)] == [f"{nasty}.png"]
    page.locator(".correct").first.select_option(label=f"it is {nasty}")
    assert [said for _, said, _ in shown(page)] == [nasty]
    page.locator(".correct").first.select_option(label="take that back")
    page.click("#curious summary")
    page.click("#look")
    page.wait_for_selector(".plot")
    assert page.evaluate("window.caught") is None


def test_cancelling_and_being_turned_down(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []

    def slow(labeller: Any, pile: Any, progress: Any) -> Any:
        try:
            for _ in range(1000):
                time.sleep(0.01)
                progress(0, 1)
        except BaseException:
            stopped.append(True)
            raise
        return label_pile(labeller, pile, progress)

    fill_in(page, copies(1))
    monkeypatch.setattr("trident.web.labels.label_pile", slow)
    page.click("#go")
    page.wait_for_selector("#status:has-text('Labelling')")
    assert page.locator(".class-name").first.is_disabled()
    page.click("#cancel")
    page.wait_for_selector("#status:has-text('Cancelled')")
    for _ in range(100):
        if stopped:
            break
        page.wait_for_timeout(20)
    assert stopped, "the server goes on working for nobody"
    monkeypatch.setattr("trident.web.labels.label_pile", label_pile)
    page.route("**/api/label", lambda route: route.fulfill(status=503, json={"error": "too many others just now"}))
    page.click("#go")
    page.wait_for_selector("#problem:visible")
    assert page.inner_text("#problem-text") == "Too many others just now."
    page.unroute("**/api/label")
    page.route("**/api/label", lambda route: route.abort())
    page.click("#go")
    page.wait_for_selector("#problem:has-text('cannot be reached')")
    page.unroute("**/api/label")
    label(page)
    assert page.locator("#problem").is_hidden()
    assert len(shown(page)) == 3


def test_folders_can_be_dropped(page: Any, tmp_path: Path) -> None:
    """As the system hands them over. What is no picture is left alone, and the folder lends the class its name."""
    (tmp_path / "reds" / "deeper").mkdir(parents=True)
    for name in ("b.png", "a.PNG", "deeper/c.png", ".hidden.png"):
        (tmp_path / "reds" / name).write_bytes(picture(COLOURS["red"], 0))
    (tmp_path / "reds" / "notes.txt").write_text("not a picture, and not meant to be")
    session = page.context.new_cdp_session(page)

    def drop_on(selector: str, path: Path) -> None:
        box = page.locator(selector).first.bounding_box()
        where = {"x": box["x"] + box["width"] - 15, "y": box["y"] + box["height"] - 10}
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            session.send("Input.dispatchDragEvent", {"type": kind, **where, "data": data})

    drop_on(".class", tmp_path / "reds")
    wait_until(page, "document.querySelectorAll('.example').length === 3")
    assert page.locator(".class-name").first.input_value() == "reds"
    drop_on("#pile", tmp_path / "reds")
    wait_until(page, "document.querySelectorAll('.picture').length === 3")
    assert page.locator(".name").all_inner_texts() == ["reds/a.PNG", "reds/b.png", "reds/deeper/c.png"]
    drop_on("header", tmp_path / "reds" / "b.png")  # beside: the browser must not leave the page
    assert page.locator(".picture").count() == 3


def test_pasting(page: Any) -> None:
    paste = """content => {
        const transfer = new DataTransfer();
        const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
        transfer.items.add(new File([bytes], 'pasted.png', {type: 'image/png'}));
        document.activeElement.dispatchEvent(new ClipboardEvent('paste', {clipboardData: transfer, bubbles: true}));
    }"""
    content = base64.b64encode(picture(COLOURS["red"], 0)).decode()
    page.evaluate(paste, content)
    assert (page.locator(".picture").count(), page.locator(".example").count()) == (1, 0)
    page.locator(".class-name").nth(1).focus()
    page.evaluate(paste, content)
    assert page.locator(".class").nth(1).locator(".example").count() == 1
    assert page.locator(".picture").count() == 1


def test_a_class_that_goes_takes_its_labels_along(page: Any) -> None:
    fill_in(page, copies(1))
    label(page)
    page.locator(".remove-class").nth(2).click()
    assert shown(page) == []
    assert page.locator(".class").count() == 2
    label(page)
    assert {said for _, said, _ in shown(page)} <= {"red", "green"}
