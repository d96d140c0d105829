"""`trident web` in a real browser: a visit from the first class to the table, and mishaps."""

import time
from pathlib import Path
from typing import Any

import pytest

from trident.labelling.labeller import Labeller
from web_server import COLOURS, bomb, picture
from web_visit import copies, fill_in, label, shown, table, upload, wait_until


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
    assert len(before) == 7 and {row["correction"] for row in before.values()} == {""}
    assert 0.3 < float(before["red 0.png"]["probability"]) <= 1

    wrong = next(name for name in COLOURS if name != before[odd[0]]["label"])
    page.locator(".picture").nth(6).locator(".correct").select_option(label=f"it is {wrong}")
    assert shown(page)[6] == (odd[0], wrong, "your label")
    assert "label again" in page.inner_text("#status")
    with page.expect_response("**/api/label") as answered:
        label(page)
    answer = answered.value.json()
    examples = [one["class"] for one in answer["labelled"] if one["name"].startswith("none of them")]
    assert (examples, len(answer["labelled"]), len(answer["pile"])) == ([wrong], 4, 6)
    assert shown(page)[6] == (odd[0], wrong, "your label")
    assert "1 from the pile" in page.locator(".class").nth(list(COLOURS).index(wrong)).inner_text()
    rows = table(page, tmp_path)
    assert [row["path"] for row in rows] == [name for name, _ in [*copies(2), odd]]
    assert [row["correction"] for row in rows] == [""] * 6 + [wrong]
    assert rows[6]["label"] == wrong
    assert any(row["probability"] != before[row["path"]]["probability"] for row in rows[:6])  # it has learnt from it

    page.locator(".picture").nth(6).locator(".correct").select_option(label="undo")
    assert shown(page)[6][2] != "your label"


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


def test_cancelling_and_being_turned_down(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, usual = [], Labeller.label

    def slow(labeller: Any, pile: Any, progress: Any) -> Any:
        try:
            for _ in range(1000):
                time.sleep(0.01)
                progress(0, 1)
        except BaseException:
            stopped.append(True)
            raise
        return usual(labeller, pile, progress)

    fill_in(page, copies(1))
    monkeypatch.setattr(Labeller, "label", slow)
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
    monkeypatch.setattr(Labeller, "label", usual)
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


def test_a_class_that_goes_takes_its_labels_along(page: Any) -> None:
    fill_in(page, copies(1))
    label(page)
    page.locator(".remove-class").nth(2).click()
    assert shown(page) == []
    assert page.locator(".class").count() == 2
    label(page)
    assert {said for _, said, _ in shown(page)} <= {"red", "green"}
