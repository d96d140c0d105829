"""A few labelled pictures and a pile, through `trident predict` and the shipped weights: real files, real network."""

import csv
import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ablation_grids import Answer
from commands import assert_one_line_error
from tiny import TINY_METHOD, TINY_RECIPE
from trident.data.images import ImageFile
from trident.data.pictures import find_pictures
from trident.errors import TridentError
from trident.labelling.labeller import CHUNK, Labeller, chunks, read_labelled
from trident.learning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

COLOURS = {"red": (200, 40, 30), "green": (30, 160, 60), "blue": (40, 60, 190)}
WEIGHTS = "mini-5w1s-set"
PREDICT = ("predict", "--backbone", "conv4")  # test_predict_features.py has the pretrained backbones


def picture(colour: str, seed: int, size: tuple[int, int] = (60, 50)) -> Image.Image:
    """A coarse pattern in shades of one colour."""
    generator = np.random.default_rng(seed)
    shades = generator.uniform(0.5, 1.2, (6, 6, 1)) * np.array(COLOURS[colour])
    return Image.fromarray(shades.clip(0, 255).astype(np.uint8)).resize(size, Image.Resampling.NEAREST)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three classes with one, two and three labelled pictures, and a pile of twelve in two folders."""
    for shots, colour in enumerate(COLOURS, 1):
        (tmp_path / "support" / colour).mkdir(parents=True)
        for i in range(shots):
            picture(colour, i).save(tmp_path / "support" / colour / f"{i}.png")
    (tmp_path / "pile" / "deeper").mkdir(parents=True)
    for place, colour in enumerate([*COLOURS] * 4):
        folder = tmp_path / "pile" / ("deeper" if place % 2 else "")
        picture(colour, 100 + place).save(folder / f"{colour}-{place}.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def labelled_rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def right(path: str, label: str | None) -> bool:
    return Path(path).name.split("-")[0] == label


def test_a_pile_is_labelled(trident_here: Callable, folders: Path) -> None:
    call = (*PREDICT, "--support", "support", "--query", "pile", "--all")
    found = trident_here(*call)
    assert found.returncode == 0, found.stderr
    rows = labelled_rows(found.stdout)
    assert len(rows) == 12
    assert list(rows[0])[:5] == ["path", "label", "probability", "runner_up", "runner_up_probability"]
    assert list(rows[0])[5:10] == ["best_guess", "none_of_these", "typicality", "picture", "correction"]
    assert list(rows[0])[10:] == ["p(blue)", "p(green)", "p(red)"]
    assert sum(right(row["path"], row["label"]) for row in rows) >= 11
    for row in rows:
        shares = [float(row[f"p({name})"]) for name in COLOURS]
        assert sum(shares) == pytest.approx(1, abs=2e-3)
        assert float(row["probability"]) == max(shares)
        assert float(row["probability"]) >= float(row["runner_up_probability"])
        assert row["label"] == row["best_guess"]
        assert (row["none_of_these"], row["typicality"], row["correction"]) == ("", "", "")  # conv4 cannot tell
    assert trident_here(*call).stdout == found.stdout


def test_json_threshold_and_files_of_all_kinds(trident_here: Callable, folders: Path) -> None:
    pile = folders / "pile"
    (pile / "broken.jpg").write_bytes(b"this is no picture")
    (pile / "phone.heic").write_bytes(b"\0\0\0 ftypheic")
    (folders / "support" / "red" / "tablet.heif").write_bytes(b"")
    (pile / "notes.txt").write_text("not a picture, and not meant to be")
    (pile / ".hidden.jpg").write_bytes(b"")
    picture("red", 1).convert("CMYK").save(pile / "red-cmyk.jpg")
    picture("green", 1).convert("RGBA").save(pile / "green-alpha.png")
    Image.fromarray(np.full((40, 40), 30_000, np.uint16)).save(pile / "deep.png")
    picture("blue", 1).convert("L").save(pile / "grey.png")
    picture("red", 1).save(pile / "red-moving.gif", save_all=True, append_images=[picture("blue", 2)])
    found = trident_here(
        *PREDICT, "--support", "support", "--query", "pile", "--out", "labels.json", "--threshold", "0.99"
    )
    assert found.returncode == 2
    named = [line for line in found.stderr.splitlines() if "skipped" in line]
    assert len(named) == 3
    assert "broken.jpg: it is not an image" in named[0]
    assert "phone.heic: HEIC pictures cannot be read here" in " ".join(named)
    assert "tablet.heif: HEIF pictures cannot be read here" in " ".join(named)
    result = json.loads((folders / "labels.json").read_text())
    assert result["classes"] == ["blue", "green", "red"]
    assert len(result["pictures"]) == 12 + 5
    for row in result["pictures"]:
        assert (row["label"] is None) == (row["probability"] < 0.99)
        assert row["best_guess"] in result["classes"]
    assert [Path(row["path"]).name for row in result["skipped"]] == ["broken.jpg", "tablet.heif", "phone.heic"]
    assert all(row["path"] in row["error"] for row in result["skipped"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--support", "nowhere", "--query", "pile"], ["--support nowhere", "no such folder"]),
        (["--support", "support", "--query", "nowhere"], ["--query nowhere", "no such folder"]),
        (["--support", "support", "--query", "empty"], ["--query empty", "no picture"]),
        (["--support", "support", "--query", "support/red"], ["is inside --support", "another folder"]),
        (["--support", "support", "--query", "support/red/0.png"], ["--query support/red/0.png", "folder"]),
        (["--support", "single", "--query", "pile"], ["one class only, 'a'"]),
        (["--support", "hollow", "--query", "pile"], ["class 'none' has no pictures"]),
        (["--support", "support", "--query", "pile", "--out", "x.txt"], ["x.txt", ".csv or .json"]),
        (["--support", "support", "--query", "pile", "--weights", "nothing"], ["nothing", "trident weights"]),
        (
            ["--support", "support", "--query", "pile", "--weights", "features-trident"],
            ["weights of features-trident classify stored features", "give the backbone efficientnet-lite0"],
        ),
        (["--support", "spoilt", "--query", "pile"], ["spoilt", "0.png", "not an image"]),
    ],
)
def test_bad_input(trident_here: Callable, folders: Path, arguments: list[str], words: list[str]) -> None:
    for name in ("empty", "hollow/some", "hollow/none", "spoilt/a", "spoilt/b", "single/a"):
        (folders / name).mkdir(parents=True)
    picture("red", 0).save(folders / "single" / "a" / "0.png")
    picture("red", 0).save(folders / "hollow" / "some" / "0.png")
    picture("red", 0).save(folders / "spoilt" / "a" / "0.png")
    (folders / "spoilt" / "b" / "0.png").write_bytes(b"no")
    found = trident_here("predict", *arguments)
    lines = [line for line in found.stderr.splitlines() if not line.startswith("weights: ")]
    assert_one_line_error(Answer([], found.returncode, found.stdout, "\n".join(lines)), *words)
    assert not (folders / "x.txt").exists()


@settings(max_examples=50)
@given(n=st.integers(0, 2000), most=st.integers(1, 200))
def test_chunks_are_even_and_mixed_and_hold_each_picture_once(n: int, most: int) -> None:
    parts = chunks(n, most)
    assert sorted(place for part in parts for place in part) == list(range(n))
    assert all(len(part) <= most for part in parts)
    assert not parts or max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts) == -(-n // most)
    if n >= 1000 and len(parts) >= 2 and len(parts[0]) >= 50:  # a sorted pile does not give sorted chunks
        assert parts[0][-1] - parts[0][0] > n / 2


def test_a_long_pile_goes_through_in_chunks_and_order_does_not_matter_within_one(tmp_path: Path) -> None:
    support, pile = {}, []
    for colour in COLOURS:
        picture(colour, 0).save(tmp_path / f"support-{colour}.png")
        support[colour] = [ImageFile(tmp_path / f"support-{colour}.png")]
    for place in range(CHUNK + 20):
        path = tmp_path / f"{[*COLOURS][place % 3]}-{place}.png"
        picture([*COLOURS][place % 3], place).save(path)
        pile.append(ImageFile(path))
    checkpoint = load_checkpoint(Path(WEIGHTS))
    labeller = Labeller(checkpoint, *read_labelled(support, 84, 3))
    seen: list[int] = []
    labelled = labeller.label(pile, lambda done, total: seen.append(done))
    assert seen == [60, 120]
    hits = [right(str(file.file), labelled.ranking(place)[0][0]) for place, file in enumerate(pile)]
    assert np.mean(hits) > 0.9
    part = pile[:20]
    one, other = labeller.label(part), labeller.label(part[::-1])
    np.testing.assert_allclose(one.probabilities, other.probabilities[::-1], atol=1e-4)


def test_weights_for_one_kind_of_task_say_so() -> None:
    checkpoint = load_checkpoint(Path(WEIGHTS))
    pictures = np.zeros((2, 84, 84, 3), np.uint8)
    with pytest.raises(TridentError, match="class 'c' has no labelled picture"):
        Labeller(checkpoint, ("a", "b", "c"), pictures, np.array([0, 1]))


def test_finding_pictures(tmp_path: Path) -> None:
    (tmp_path / "b" / ".git").mkdir(parents=True)
    for name in ("z.JPG", "a.png", "b/c.webp", "b/.git/d.png", "b/e.CR2", "f.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    pictures, unread = find_pictures(tmp_path)
    assert [str(file.file.relative_to(tmp_path)) for file in pictures] == ["a.png", "z.JPG", "b/c.webp"]
    assert len(unread) == 2 and "leads nowhere" in unread[str(tmp_path / "gone.png")]
    assert "e.CR2: CR2 pictures cannot be read here" in unread[str(tmp_path / "b" / "e.CR2")]


def test_labelled_pictures_are_not_of_the_pile(trident_here: Callable, folders: Path) -> None:
    found = trident_here(*PREDICT, "--support", "support", "--query", ".")
    assert len(labelled_rows(found.stdout)) == 12


def test_what_is_not_sure_enough_has_its_best_guess_apart(trident_here: Callable, folders: Path) -> None:
    picture("red", 0).save(folders / "support" / "beside.png")
    found = trident_here(*PREDICT, "--support", "support", "--query", "pile", "--threshold", "1", "--out", "all.csv")
    assert found.returncode == 2
    assert "skipped support/beside.png: it is not in a class folder" in found.stderr
    assert "labelled 0 of 12 pictures, see all.csv" in found.stderr
    rows = list(csv.DictReader((folders / "all.csv").open()))
    assert {row["label"] for row in rows} == {""}
    assert {row["best_guess"] for row in rows} == {"red", "green", "blue"}


def test_names_that_are_no_unicode(trident_here: Callable, folders: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    picture("red", 9).save(folders / "pile" / name)
    found = trident_here(*PREDICT, "--support", "support", "--query", "pile", "--out", "labels.csv")
    assert found.returncode == 0, found.stderr
    assert b"caf\xe9.png,red," in (folders / "labels.csv").read_bytes()


def test_a_pile_of_what_cannot_be_read_says_why(trident_here: Callable, folders: Path) -> None:
    (folders / "phone").mkdir()
    (folders / "phone" / "1.heic").write_bytes(b"")
    found = trident_here("predict", "--support", "support", "--query", "phone")
    assert found.returncode == 2
    assert "it has no picture to label" in found.stderr
    assert "HEIC" in found.stderr


def test_support_batch_norm_does_not_look_at_queries_whatever_the_shots() -> None:
    method = replace(TINY_METHOD, attfex="off", classifier_start="prototypes")
    recipe = replace(TINY_RECIPE, method=method, protocol=replace(TINY_RECIPE.protocol, batch_norm="support"))
    checkpoint = Checkpoint(recipe, recipe.initial(0), recipe.model.initial_running(), 0)
    pictures = np.random.default_rng(0).integers(0, 256, (10, 16, 16, 1), np.uint8)
    labeller = Labeller(checkpoint, ("a", "b", "c"), pictures[:6], np.array([0, 0, 0, 0, 1, 2]))
    together = labeller.probabilities(pictures[6:])
    np.testing.assert_allclose(labeller.probabilities_alone(pictures[6:]), together, atol=1e-6)


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"]),
    cut=st.floats(0, 1),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=8),
)
def test_mutated_pictures_never_break_a_pile(
    tmp_path_factory: pytest.TempPathFactory, kind: str, cut: float, changes: list[tuple[float, int]]
) -> None:
    """The good picture beside a damaged one is labelled, and the damaged one is labelled or named."""
    folder = tmp_path_factory.mktemp("fuzz")
    content = io.BytesIO()
    picture("red", 3).save(content, kind)
    mutated = bytearray(content.getvalue()[: max(1, int(cut * len(content.getvalue())))])
    for where, value in changes:
        mutated[min(int(where * len(mutated)), len(mutated) - 1)] = value
    (folder / "damaged.png").write_bytes(bytes(mutated))
    picture("blue", 4).save(folder / "good.png")

    class Guess(Labeller):
        def probabilities(self, queries: np.ndarray) -> np.ndarray:
            assert queries.shape[1:] == (84, 84, 3)
            return np.tile([0.25, 0.75], (len(queries), 1))

    labeller = Guess(load_checkpoint(Path(WEIGHTS)), ("a", "b"), np.zeros((2, 84, 84, 3), np.uint8), np.array([0, 1]))
    labelled = labeller.label([ImageFile(folder / "damaged.png"), ImageFile(folder / "good.png")])
    assert labelled.ranking(1)[0] == ("b", 0.75)
    assert (0 in labelled.failures) == bool(np.isnan(labelled.probabilities[0]).all())
    assert all("damaged.png" in why for why in labelled.failures.values())


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), 1e30])
def test_weights_that_are_not_finite_give_an_error_and_no_labels(
    trident_here: Callable, folders: Path, spoilt: float
) -> None:
    good = load_checkpoint(WEIGHTS)
    bad = {key: value * spoilt for key, value in good.parameters.items()}
    save_checkpoint(folders / "bad.safetensors", replace(good, parameters=bad))
    for more in ([], ["--json"], ["--out", "labels.csv"]):
        call = ("--support", "support", "--query", "pile", "--weights", "bad.safetensors", *more)
        found = trident_here(*PREDICT, *call)
        assert found.returncode == 2 and found.stdout == "", found
        last = found.stderr.splitlines()[-1]
        assert last.startswith("trident: error: bad.safetensors: the prediction is not finite"), last
    assert not (folders / "labels.csv").exists()


def test_labelled_pictures_in_a_list_are_not_labelled_again(trident_here: Callable, folders: Path) -> None:
    (folders / "link").symlink_to(folders / "support" / "red")
    listed = ["pile/blue-2.jpg", "./pile/blue-2.jpg", "support/red/0.png", "link/1.png"]
    (folders / "list.txt").write_text("\n".join(listed))
    call = (*PREDICT, "--support", "support", "--query", "list.txt")
    found = trident_here(*call)
    assert found.returncode == 0 and len(labelled_rows(found.stdout)) == 1, found
    assert "2 pictures of the pile are labelled already" in found.stderr
    (folders / "list.txt").write_text("support/red/0.png")
    assert_one_line_error(trident_here(*call), "no picture to label (all 1 are labelled already)")


def test_no_class_is_called_none_of_these(trident_here: Callable, folders: Path) -> None:
    (folders / "support" / "red").rename(folders / "support" / "None of these")
    call = (*PREDICT, "--support", "support", "--query", "pile")
    assert_one_line_error(trident_here(*call), "a class cannot be called 'None of these'")


def test_names_that_act_on_terminals_and_spreadsheets(trident_here: Callable, folders: Path) -> None:
    """As a formula in the table, which corrections are read back from; as escapes on standard error."""
    (folders / "support" / "blue").rename(folders / "support" / "=blue")
    for name in ("pile/\x1b[31mred-1\nnew.jpg", "=red-1.jpg"):
        picture("red", 9).save(folders / name)
    (folders / "pile" / "\x1b[2Jno picture\n.jpg").write_bytes(b"x")
    (folders / "list.txt").write_text("=red-1.jpg\npile/blue-2.jpg\n")
    call = (*PREDICT, "--support", "support")
    found = trident_here(*call, "--query", "pile", "--out", "all.csv")
    assert found.returncode == 2
    assert "\x1b" not in found.stderr
    announced = trident_here("sort", "all.csv", "--to", "to\x1b[1m").stderr
    assert "\x1b" not in announced
    assert r"would copy pile/\x1b[31mred-1\nnew.jpg to to\x1b[1m/red/" in announced
    assert r"trident: skipped pile/\x1b[2Jno picture\n.jpg" in found.stderr
    assert "\n\x1b[31m" not in (folders / "all.csv").read_text() and ",=" not in (folders / "all.csv").read_text()
    found = trident_here(*call, "--query", "list.txt", "--out", "few.csv")
    assert found.returncode == 0, found.stderr
    table = (folders / "few.csv").read_text()
    assert "\n'=red-1.jpg,red," in table and "\npile/blue-2.jpg,'=blue," in table
    rows = labelled_rows(table)
    lines = ["path,correction\n", *(f"{row['path']},{row['label']}\n" for row in rows)]
    (folders / "right.csv").write_text("".join(lines))
    found = trident_here(*call, "--query", "list.txt", "--corrections", "right.csv", "--json")
    assert [one["correction"] for one in json.loads(found.stdout)["pictures"]] == ["red", "=blue"]
