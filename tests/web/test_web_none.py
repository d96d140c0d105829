"""`trident web` with pretrained features in a real browser: pictures that belong to none of the classes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trident.backbones.pretrained import find_backbone
from trident.data.images import ImageFile, ImageSource
from trident.labelling.class_names import NONE
from trident.labelling.making import HINT, make_labeller
from trident.labelling.tables import as_csv, read_corrections, rows_of
from trident.labelling.typicality import LEAST_TYPICAL
from trident.web.networks import FeatureNetwork, WeightStore
from web_backbone import NAME, Counting
from web_server import COLOURS, Site, picture, site
from web_visit import BESIDE_THE_PAGE, copies, fill_in, label, shown, table, upload, visit

GREY = ("grey.png", picture((150, 150, 150), 5))
GREYER = ("greyer.png", picture((90, 90, 90), 6))


@pytest.fixture(scope="module")
def by_features() -> Iterator[Site]:
    with site(FeatureNetwork(find_backbone(NAME))) as running:
        yield running


@pytest.fixture
def seen(browser: Any, by_features: Site) -> Iterator[Any]:
    """A visitor's page."""
    with visit(browser, by_features.address) as found:
        yield found


def tile(page: Any, name: str) -> Any:
    return page.locator(".picture").filter(has=page.get_by_text(name, exact=True))


def test_pictures_of_none_of_the_classes(seen: Any, tmp_path: Path) -> None:
    fill_in(seen, [*copies(4), GREY])
    label(seen)
    assert "13 pictures labelled, 1 in none of the classes" in seen.inner_text("#status")
    assert "13 pictures, 1 in none of the classes" in seen.inner_text("#pile-count")
    assert all(name.startswith(said) for name, said, _ in shown(seen)[:12])
    assert shown(seen)[12] == ("grey.png", NONE, "")
    grey = tile(seen, "grey.png")
    assert "none" in grey.get_attribute("class").split()
    assert grey.locator(".confidence").is_hidden()
    guess = grey.locator(".second").inner_text()
    assert guess.startswith("best guess: ") and guess.split()[2].rstrip(",") in COLOURS
    assert seen.locator(".picture.none").count() == 1

    row = table(seen, tmp_path)[12]
    assert (row["label"], row["none_of_these"], row["correction"]) == ("", "yes", "")
    assert row["best_guess"] in COLOURS and 0 <= float(row["typicality"]) < LEAST_TYPICAL
    assert f"{float(row['probability']):.0%}".replace("%", "\u00a0%") in guess

    seen.select_option("#sort", label="least sure first")
    assert shown(seen)[0][0] == "grey.png"
    sure = [float(bar.get_attribute("aria-valuenow")) for bar in seen.locator(".confidence:visible").all()]
    assert sure == sorted(sure)
    seen.select_option("#sort", label="most sure first")
    assert shown(seen)[12][0] == "grey.png"
    seen.select_option("#sort", label="by label")
    assert [said for _, said, _ in shown(seen)] == [name for name in COLOURS for _ in range(4)] + [NONE]

    # The network was wrong: the visitor gives it a class, and it is an example from then on.
    grey.locator(".correct").select_option(label="it is blue")
    assert seen.locator(".picture.none").count() == 0
    with seen.expect_response("**/api/label") as answered:
        label(seen)
    assert [one["class"] for one in answered.value.json()["labelled"] if one["name"] == "grey.png"] == ["blue"]


def test_the_visitor_says_that_it_is_none(seen: Any, tmp_path: Path) -> None:
    fill_in(seen, [*copies(4), GREY])
    label(seen)
    red, again = tile(seen, "red 0.png"), f"it is {NONE}"
    red.locator(".correct").select_option(label=again)
    assert shown(seen)[0] == ("red 0.png", NONE, "your label")
    assert red.locator(".second").inner_text() == ""
    assert "2 in none of the classes, 1 correction" in seen.inner_text("#pile-count")
    assert all("from the pile" not in card.inner_text() for card in seen.locator(".class").all())
    for _ in range(2):  # it stays, however often the rest is labelled
        with seen.expect_response("**/api/label") as answered:
            label(seen)
        answer = answered.value.json()
        assert "red 0.png" not in [one["name"] for one in [*answer["labelled"], *answer["pile"]]]
        assert (len(answer["labelled"]), len(answer["pile"])) == (3, 12)
        assert shown(seen)[0] == ("red 0.png", NONE, "your label")
        assert "none" in red.get_attribute("class").split()
    seen.locator(".remove-class").nth(2).click()
    assert shown(seen) == [("red 0.png", NONE, "your label")]  # it is true of fewer classes as well
    label(seen)
    assert shown(seen)[0] == ("red 0.png", NONE, "your label")
    seen.select_option("#sort", label="least sure first")
    assert shown(seen)[-1][0] == "red 0.png"
    seen.select_option("#sort", label="as added")
    red.locator(".correct").select_option(label="undo")
    assert "none" not in red.get_attribute("class").split()
    label(seen)
    assert shown(seen)[0][1] == "red"


def test_the_table_is_the_one_of_predict(seen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [*copies(4), GREY, GREYER, ("=1;-2.png", picture(COLOURS["red"], 50))]
    fill_in(seen, asked)
    label(seen)
    tile(seen, "red 0.png").locator(".correct").select_option(label=f"it is {NONE}")
    tile(seen, "greyer.png").locator(".correct").select_option(label="it is green")
    label(seen)
    table(seen, tmp_path)
    said = {"red 0.png": NONE, "greyer.png": "green"}
    assert read_corrections(tmp_path / "labels.csv")[0] == said

    monkeypatch.chdir(tmp_path)
    files = {}
    for name, content in [*asked, *((f"example of {one}.png", picture(rgb, 0)) for one, rgb in COLOURS.items())]:
        Path(name).write_bytes(content)
        files[name] = ImageFile(Path(name))
    labelled = {one: [files[f"example of {one}.png"]] for one in COLOURS}
    labelled["green"].append(files["greyer.png"])
    pile = [files[name] for name, _ in asked if name not in said]
    found = make_labeller(labelled, NAME).label(pile)
    corrected: dict[ImageSource, str] = {files[name]: right for name, right in said.items()}
    expected = as_csv(rows_of(found, pile, corrected, 0.0, False), found.classes, every=False)
    head, *rows = (tmp_path / "labels.csv").read_text("utf-8").splitlines()
    assert sum(row.startswith("'=1;'-2.png,") for row in rows) == 1
    assert [head, *sorted(rows)] == [expected.splitlines()[0], *sorted(expected.splitlines()[1:])]


def test_what_the_page_says_about_the_network(seen: Any, browser: Any, weights: Path) -> None:
    assert seen.inner_text("#weights").startswith(
        f"Features of {NAME} (trained on nothing). Pictures are scaled to 32x32"
    )
    assert seen.locator("#by-features").is_visible() and not seen.locator("#by-weights").is_visible()
    assert not seen.locator("#curious").is_visible()
    assert not seen.locator("#hint").is_visible()
    told = WeightStore(str(weights))
    told.hint = HINT
    with (
        site(told) as running,
        visit(browser, running.address) as page,
    ):
        assert page.inner_text("#weights").startswith("Weights: tiny (")
        assert page.locator("#by-weights").is_visible() and not page.locator("#by-features").is_visible()
        assert page.locator("#curious").is_visible()
        assert page.inner_text("#hint") == f"For whoever runs this server: {HINT}."


def test_labelling_again_is_fast_for_the_same_tab_only(browser: Any) -> None:
    backbone = find_backbone(NAME)
    counting = Counting(backbone)
    new = ("new.png", picture(COLOURS["red"], 50))
    with site(FeatureNetwork(replace(backbone, compute=counting))) as running:
        with visit(browser, running.address) as page:
            fill_in(page, [(name, picture(COLOURS["red"], place)) for place, (name, _) in enumerate(copies(2), 10)])
            label(page)
            assert counting.computed == 3 + 6
            page.set_input_files("#pile-files", upload([new]))
            page.wait_for_selector("#status:has-text('label again')")
            label(page)
            assert (counting.computed, len(shown(page))) == (3 + 6 + 1, 7)
        with visit(browser, running.address) as page:
            fill_in(page, [new])
            label(page)
            assert counting.computed == 3 + 6 + 1 + 3 + 1


def test_a_class_cannot_be_called_none_of_these(seen: Any) -> None:
    fill_in(seen, copies(1))
    seen.locator(".class-name").nth(0).fill(f" {NONE.replace(' ', '  ')}")
    assert f"“{NONE}” cannot be the name of a class" in seen.inner_text("#status")
    assert seen.locator("#go").is_disabled()


def test_leaving_the_page_asks_before_work_is_lost(seen: Any) -> None:
    asked: list[str] = []

    def stay(dialog: Any) -> None:
        asked.append(dialog.type)
        dialog.dismiss()

    seen.on("dialog", stay)
    seen.click("h1")  # browsers ask only those who have done something
    seen.reload()
    seen.wait_for_selector(".class")
    assert asked == []  # there is nothing to lose
    fill_in(seen, copies(1))
    label(seen)
    seen.close(run_before_unload=True)
    for _ in range(100):
        if asked:
            break
        seen.wait_for_timeout(20)
    assert asked == ["beforeunload"]
    assert len(shown(seen)) == 3  # all is still there
    seen.click("#empty-pile")
    for remove in [".example .remove"] * 3:
        seen.click(f"{remove} >> nth=0")
    seen.reload()
    assert asked == ["beforeunload"]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (400, "dark"), (1280, "light")])
def test_it_looks_right(seen: Any, width: int, scheme: str) -> None:
    seen.set_viewport_size({"width": width, "height": 800})
    seen.emulate_media(color_scheme=scheme)
    fill_in(seen, [*copies(2), GREY, GREYER])
    label(seen)
    tile(seen, "red 0.png").locator(".correct").select_option(label=f"it is {NONE}")
    assert seen.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.evaluate(BESIDE_THE_PAGE) == []
    for one in seen.locator(".picture.none").all():
        assert one.locator(".frame").evaluate("frame => getComputedStyle(frame).outlineStyle") == "dashed"
    assert seen.locator(".picture.none").count() == 3


def test_none_of_these_by_keyboard(seen: Any) -> None:
    fill_in(seen, copies(2))
    label(seen)
    seen.focus(".correct >> nth=1")
    seen.keyboard.press("End")
    assert shown(seen)[1] == ("green 0.png", NONE, "your label")
