"""The leaderboard: the same tasks for all methods, kept results, and tables made from nothing else."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest

from commands import assert_one_line_error
from studies.leaderboard.__main__ import study
from studies.leaderboard.document import ABSENT, introduction_of, network_of, whole_document
from studies.leaderboard.page import page
from trident.data.glyphs import open_glyphs
from trident.data.store import class_table, store_in_memory
from trident.errors import TridentError
from trident.files import short_digest
from trident.leaderboard.measuring import (
    Features,
    checkpoint_of,
    fingerprint_of_test_classes,
    measure,
    under_condition,
    with_features,
)
from trident.leaderboard.results import Line, add, lines_of, missing, read, tasks_by_condition
from trident.leaderboard.rows import BOARDS, Row, board_called, row_called, rows
from trident.learning.checkpoint import load_checkpoint
from trident.learning.frozen_weights import with_conv4
from trident.measuring.evaluate import evaluate
from trident.measuring.record import FILE_NAME, difference, packed, unpacked
from trident.methods.registry import method_class, method_name, method_paths
from trident.recipes.files import recipe_names
from trident.recipes.loading import RETIRED
from trident.settings import EpisodeSpec, Protocol
from trident.tasks.episodes import EpisodeSampler, task_generator
from trident.weights import FOLDER

ROOT = Path(__file__).parents[2]
GLYPHS = board_called("glyphs")
ROWS = ("simpleshot", "soft-kmeans", "laplacian-shot")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of three rows on a few tasks of glyphs."""
    folder, store, features = tmp_path_factory.mktemp("results"), open_glyphs(), Features("cpu")
    for name in ROWS:
        add(name, "glyphs", measure(row_called(name), GLYPHS, store, store, features, 20, "cpu"), folder)
    return folder


# The field


@pytest.mark.parametrize("row", rows().values(), ids=list(rows()))
def test_every_row_names_a_method_and_what_it_is_measured_with(row: Row) -> None:
    assert row.method in method_paths()
    assert row.batch_norm in ("running", "transductive")
    for board in BOARDS.values():
        if board.name != "glyphs" or row.weights_on(board) in recipe_names():
            assert row.recipe_on(board).method.about.trained_on == method_class(row.method)().about.trained_on
            assert row.batch_norm == "transductive" or row.together == row.method_on(board).classifies_together
    for figure in row.published:
        assert 20 < figure.accuracy < 100 and figure.n_shot in (1, 5) and figure.source


def test_the_field_has_the_systems_of_the_paper() -> None:
    assert len({row.method for row in rows().values()}) >= 35
    assert {"CTM", "DPGN", "LFWT", "PAL", "TPMN", "LIF-EMD", "Proto-Completion"} <= {
        system["title"] for system in ABSENT
    }


# Measuring


def test_features_computed_beforehand_give_the_predictions_of_images() -> None:
    row, store = row_called("simpleshot"), open_glyphs()
    whole = checkpoint_of(row, GLYPHS)
    reduced, seen = with_features(whole, store, row, Features("cpu"))
    assert seen.features_of == "weights:glyphs-simpleshot" and not reduced.recipe.shapes().keys() & {
        "backbone.0.weight"
    }
    found = [
        evaluate(under_condition(checkpoint, row, Protocol()), where, split="test", tasks=6, seed=0).predictions
        for checkpoint, where in ((whole, store), (reduced, seen), (with_conv4(reduced), store))
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0].labels, other.labels)  # the very same tasks
        np.testing.assert_allclose(found[0].log_probabilities, other.log_probabilities, atol=1e-4)
    assert with_features(whole, store, row, Features("cpu"), images=100) == (whole, store)  # would be slower


def test_what_is_kept_of_a_row(measured: Path) -> None:
    results = read("glyphs", measured)["soft-kmeans"]
    assert set(results) == {"balanced", "dirichlet", "alone"}
    balanced = results["balanced"]
    accuracies = balanced.accuracies
    assert accuracies is not None and len(accuracies) == balanced.tasks == 20 and results["alone"].tasks == 4
    assert balanced.accuracy == pytest.approx(accuracies.mean())
    assert balanced.accuracy > 80
    assert "shuffled queries, balanced" in balanced.described and "20 tasks" in balanced.described
    assert balanced.parameters == 7_248  # of the Conv4; the method has none


def test_a_method_for_a_fixed_number_of_queries_takes_none_alone(tmp_path: Path) -> None:
    store = open_glyphs()
    found = measure(row_called("ssr"), GLYPHS, store, store, Features("cpu"), 2, "cpu")
    assert set(found) == {"balanced", "dirichlet"}
    add("ssr", "glyphs", found, tmp_path)
    lines = lines_of(GLYPHS, tmp_path)
    assert tasks_by_condition(lines) == {"balanced": "2", "dirichlet": "2"}
    assert "SSR" in page(tmp_path) and "SSR" in whole_document("# Title", tmp_path)
    assert "ssr" in missing(BOARDS["mini-1-shot"], tmp_path)
    assert "ssr" not in missing(BOARDS["mini-1-shot-10-queries"], tmp_path)


def test_kept_results_are_those_of_the_rows_as_they_are_now() -> None:
    """After a change of settings or weights a row must be measured anew."""
    folders = (FOLDER, ROOT / "packages" / "weights" / "trident_weights")
    digests = {path.name: short_digest(path) for folder in folders for path in folder.glob("*.safetensors")}
    for board in BOARDS.values():
        for name, conditions in read(board.name).items():
            row = row_called(name)
            for one in conditions.values():
                now = row.method_on(board)
                method = asdict(now)
                # A setting that came later had its default.
                kept = {entry.name: entry.default for entry in fields(now)} | one.weights["method"]
                # One that is gone had the only value that it could have.
                retired = RETIRED.get(method_name(now), {})
                gone = {key for key in kept.keys() - method if retired.get(key, ...) == kept[key]}
                kept = {key: value for key, value in kept.items() if key not in gone}
                # Settings of training alone do not change what is measured.
                differ = {key for key, value in method.items() if kept[key] != value}
                assert all(key.startswith("training_") for key in differ), (name, board.name, differ)
                assert kept.keys() == method.keys()
                file = None if row.recipe else f"{row.weights_on(board)}.safetensors"
                assert one.weights["file"] == file
                assert file is None or one.weights["digest"] == digests[file], (name, board.name)


def test_features_are_centred_on_the_training_images_of_their_network() -> None:
    """Also where the images come from another dataset, whose training classes the network has not seen."""
    store, board = open_glyphs(), GLYPHS
    checkpoint = checkpoint_of(row_called("bd-cspn"), board)
    mean = load_checkpoint("glyphs-simpleshot").running["mean_feature"]
    np.testing.assert_array_equal(checkpoint.running["mean_feature"], mean)
    _, features = with_features(checkpoint, store, row_called("bd-cspn"), Features("cpu"))
    assert {entry.split for entry in features.classes} == {"val", "test"}


def test_differences_are_paired(measured: Path) -> None:
    one, other = (read("glyphs", measured)[name]["balanced"] for name in ("soft-kmeans", "simpleshot"))
    found = difference(one, other)
    assert found is not None and one.hits is not None and other.hits is not None
    each = 100 * (unpacked(one.hits) - unpacked(other.hits)) / GLYPHS.episode.n_queries
    assert found == pytest.approx((each.mean(), 1.96 * each.std(ddof=1) / np.sqrt(20)))
    assert difference(one, replace(other, data="other")) is None


def test_a_store_with_other_training_classes_has_the_same_tasks() -> None:
    whole = open_glyphs()
    test = whole.classes_of("test")
    first = test[0].start
    images = whole.images[first : test[-1].start + test[-1].count]
    part = store_in_memory("glyphs", images, class_table((entry.name, entry.split, entry.count) for entry in test))
    drawn = [
        EpisodeSampler(store, "test", EpisodeSpec(5, 1, 5), Protocol()).draw(task_generator(0, "test", 3))
        for store in (whole, part)
    ]
    assert (drawn[0].query == drawn[1].query + first).all()
    assert fingerprint_of_test_classes(whole) == fingerprint_of_test_classes(part)


def test_counts_survive_packing() -> None:
    for counts in ([0, 1, 75, 255, 256, 65_535], [0, 65_536, 2**32 - 1], []):
        np.testing.assert_array_equal(unpacked(packed(np.array(counts, np.int64))), counts)
    assert packed(np.array([1, 65_535])) == "AQD//w=="  # as it is in stored results
    np.testing.assert_array_equal(unpacked("AQACAA=="), [1, 2])  # older results have two bytes for small numbers, too


# Tables


def test_lines_are_sorted_and_compared(measured: Path) -> None:
    lines = lines_of(GLYPHS, measured)
    assert {line.row.name for line in lines} == set(ROWS)
    accuracies = [line.balanced.accuracy for line in lines]
    assert accuracies == sorted(accuracies, reverse=True)
    assert {line.row.name: line.against is None for line in lines}["simpleshot"]
    assert {line.row.name: line.together for line in lines} == dict(zip(ROWS, (False, True, True), strict=True))


@pytest.mark.parametrize(
    ("name", "together", "network"),
    [
        ("feat", False, "own, from mini-simpleshot"),
        ("feat-transductive", True, "own, from mini-simpleshot"),
        ("simple-cnaps", False, "frozen"),
        ("transductive-cnaps", True, "frozen"),
        ("protonet", False, "own, LeakyReLU"),
        ("protonet-batch", True, "own, LeakyReLU, batch norm of the task's images"),
        ("sib", True, "frozen"),
    ],
)
def test_what_a_line_says_about_its_row(name: str, together: bool, network: str) -> None:
    line = Line(row_called(name), BOARDS["mini-1-shot"], {}, None)
    assert line.together is together and network_of(line) == network


def test_document_and_page_are_made_from_the_results_alone(measured: Path) -> None:
    text = whole_document("# Title\n\nBy hand.", measured)
    assert text == whole_document("# Title\n\nBy hand.", measured)
    assert text.startswith("# Title\n\nBy hand.\n") and "| LaplacianShot (`laplacian-shot`) |" in text
    html = page(measured)
    assert html == page(measured)
    assert "LaplacianShot" in html and "http" not in html.replace("http://www.w3.org", "")


def test_the_documents_tables_are_those_of_the_kept_results() -> None:
    """`python -m studies.leaderboard --document docs/leaderboard.md` makes them."""
    path = ROOT / "docs" / "leaderboard.md"
    assert path.read_text("utf-8") == whole_document(introduction_of(path))
    kept, made = path.with_suffix(".html").read_text("utf-8"), page()
    assert kept.rpartition("</figure>")[2] == made.rpartition("</figure>")[2]  # drawings differ between versions


# The command


def test_the_table_of_the_command(trident_here: Callable, measured: Path) -> None:
    shown = trident_here("leaderboard", "--board", "glyphs", "--results", str(measured)).stdout
    assert shown.splitlines()[0].split()[:4] == ["method", "balanced", "dirichlet", "alone"]
    assert "soft-kmeans" in shown and "20 tasks balanced" in shown
    call = ("leaderboard", "--board", "glyphs", "--results", str(measured), "--json")
    assert "ms/task" not in shown  # times of a CPU and of a GPU do not belong in one column
    listed = json.loads(trident_here(*call).stdout)
    assert {entry["name"] for entry in listed} == set(ROWS)


def test_document_page_and_figure_are_written(trident_here: Callable, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.md", "a.html", "a.svg")]
    options = [str(part) for pair in zip(("--document", "--page", "--figure"), files, strict=True) for part in pair]
    assert trident_here(*options, command=study).returncode == 0
    text, html, figure = (file.read_text("utf-8") for file in files)
    assert "| PT+MAP (`pt-map`) |" in text and "PT+MAP" in html and "<svg" in figure


def test_one_command_adds_a_row(trident_here: Callable, tmp_path: Path) -> None:
    call = ("leaderboard", "measure", "bd-cspn", "--board", "glyphs", "--tasks", "4", "--results", str(tmp_path))
    assert "bd-cspn on glyphs: balanced " in trident_here(*call).stderr
    assert list(read("glyphs", tmp_path)) == ["bd-cspn"]


def test_mistakes(trident_here: Callable, tmp_path: Path) -> None:
    def told(*arguments: str, words: str) -> None:
        call = {"command": study} if arguments[0] == "write" else {}
        given = arguments[1:] if call else ("leaderboard", *arguments)
        assert_one_line_error(trident_here(*given, **call), words)

    kept = ("--results", str(tmp_path))
    told("--board", "x", words="no board is called 'x': there are mini-1-shot")
    told("measure", "x", "--board", "glyphs", *kept, words="the leaderboard has no row 'x'")
    told("measure", "bms", words="Missing option '--results'")
    told("measure", "bms", *kept, words="measure on what?")
    told("measure", "bms", "--board", "mini-1-shot", *kept, words="board mini-1-shot needs --data STORE")
    told("measure", "maml", "--board", "glyphs", *kept, words="weights glyphs-maml are not installed")
    told("--board", "glyphs", *kept, words="nothing was measured on glyphs yet: trident leaderboard --quick")
    told("--results", "nowhere", words="there is no folder of results at nowhere")
    told("--tasks", "10", words="--tasks is for --quick")
    told("--quick", "--board", "mini-5-shot", words="--quick measures the board glyphs")
    told("--board", "glyphs", "--json", *kept, words="nothing was measured on glyphs yet")
    told("write", "--figure", f"{tmp_path}/a.txt", "--document", f"{tmp_path}/d.md", words="a.txt")
    assert not (tmp_path / "d.md").exists()
    told("write", words="nothing to write")
    (tmp_path / "notes.md").write_text("# Notes\n\n## Kept\n")
    told("write", "--document", str(tmp_path / "notes.md"), words="is another document: it has no heading")
    assert (tmp_path / "notes.md").read_text() == "# Notes\n\n## Kept\n"
    (tmp_path / "notes.md").unlink()
    told("write", "--document", f"{tmp_path}/d.md", *kept, words=f"{tmp_path} has no results")
    assert_one_line_error(trident_here("leaderboard", "write", "--page", "x.html"), "python -m studies.leaderboard")
    assert list(tmp_path.iterdir()) == []
    assert "mini-1-shot" in trident_here("leaderboard", "boards").stdout
    (tmp_path / "bms.json").write_text('{"glyphs": {"balanced": {}}}')
    with pytest.raises(TridentError, match=r"bms on glyphs are damaged: 'balanced\.accuracy' is missing"):
        read("glyphs", tmp_path)
    (tmp_path / FILE_NAME).write_text('{"name": "bms on glyphs"}\n[]\n')
    with pytest.raises(TridentError, match=r"results\.jsonl is damaged: line 2"):
        read("glyphs", tmp_path)


def test_folders_with_a_file_for_each_row_are_read(tmp_path: Path) -> None:
    balanced = {"accuracy": 50.0, "ci95": 1.0, "ece": 0.1, "temperature": 2.0, "tasks": 2, "hits": "CwAMAA=="}
    balanced |= {"protocol": "glyphs test", "data": "abc", "device": "cpu", "milliseconds": 1.0, "parameters": 3}
    content = {"glyphs": {"balanced": balanced | {"weights": {}, "trident": "0.2.0"}}}
    for name in ("bms", "simpleshot"):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    line = next(line for line in lines_of(GLYPHS, tmp_path) if line.row.name == "bms")
    assert line.above == "+0.00 ± 0.00"  # the same tasks
    assert (line.figure("balanced"), line.ece, line.balanced.described) == ("50.00 ± 1.00", "0.1000", "glyphs test")
    add("bms", "glyphs", {"balanced": replace(line.balanced, accuracy=60.0)}, tmp_path)
    assert lines_of(GLYPHS, tmp_path)[0].balanced.accuracy == 60
    damaged = content["glyphs"]["balanced"] | {"hits": "CwAMAA"}
    (tmp_path / "pt-map.json").write_text(json.dumps({"glyphs": {"balanced": damaged}}))
    with pytest.raises(TridentError, match="hits are not the numbers"):
        lines_of(GLYPHS, tmp_path)
