"""`trident web` in a real browser: by keyboard, on small screens, by drop and paste, and whatever the names."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from web_server import COLOURS, File, picture
from web_visit import BESIDE_THE_PAGE, copies, fill_in, label, shown, upload, wait_until


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
    assert shown(page)[0][2] == "your label"
    tab_to("#go")
    page.keyboard.press("Space")
    page.wait_for_selector("#status:has-text('2 pictures labelled')")
    page.focus("#pile-files")
    page.keyboard.press("Shift+Tab")
    page.focus(".picture .remove >> nth=1")
    page.keyboard.press("Enter")
    assert page.locator(".picture").count() == 2
    assert page.evaluate("document.activeElement.closest('.picture') !== null")  # the focus is not lost


@pytest.mark.slow
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
    page.locator(".correct").first.select_option(label="undo")
    page.click("#curious summary")
    page.click("#look")
    page.wait_for_selector(".plot")
    assert page.evaluate("window.caught") is None


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
