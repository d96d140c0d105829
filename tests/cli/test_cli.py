"""The command as a user runs it: results, and bad input told in one line with exit code 2 and nothing written."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ablation_grids import Answer
from commands import Trident_command, assert_one_line_error
from stores import write_store
from tiny import TINY_BACKBONE, TINY_RECIPE, tiny_store
from trident.cli import console
from trident.cli.app import app
from trident.data import READERS
from trident.data.store import open_store
from trident.grids.files import MeasuredOn
from trident.learning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

Here = Callable[..., Answer]
CALIBRATE = ("evaluate", "--also", "calibration")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trident_here: Here) -> Here:
    """The command in an empty folder, but in this very process."""
    monkeypatch.chdir(tmp_path)
    return trident_here


@pytest.fixture
def store(tmp_path: Path) -> Path:
    images = tiny_store()
    write_store(tmp_path / "noise.store", "noise", images.classes, iter(images.images))
    return tmp_path / "noise.store"


@pytest.fixture
def weights(tmp_path: Path, store: Path) -> Path:
    """Untrained weights in a file of their own."""
    provenance = {"data": str(store), "dataset": "noise", "fingerprint": open_store(store).fingerprint}
    running = TINY_RECIPE.model.initial_running()
    checkpoint = Checkpoint(TINY_RECIPE, TINY_RECIPE.initial(0), running, 0, provenance=provenance)
    save_checkpoint(tmp_path / "weights.safetensors", checkpoint)
    return tmp_path / "weights.safetensors"


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_parameter_counts(here: Here) -> None:
    def total(*arguments: str) -> int:
        result = here("recipes", *arguments, "--json")
        return int(json.loads(result.stdout)["total"])

    assert total("mini-5w5s") == 412_238
    assert total("mini-5w1s") == 410_760
    assert total("mini-5w1s", "method.decoder_batch_norm=true") == 410_958
    assert total("mini-5w1s", "--decoder-batch-norm", "on") == 410_958


def test_recipes_are_listed_and_explained(here: Here) -> None:
    assert "mini-5w5s" in here("recipes").stdout
    assert "mini-5w5s" in {recipe["name"] for recipe in json.loads(here("recipes", "--json").stdout)}
    shown = here("recipes", "mini-5w5s").stdout
    assert "training.steps=22500" in shown
    assert "the paper's alpha_2" in shown
    assert re.search("^total +412,238$", shown, re.MULTILINE)


def test_train_and_evaluate(trident: Trident_command, here: Here) -> None:
    short = ("training.steps=2", "tasks_per_step=1", "validation_tasks=2", "backbone.channels=8", "--device", "cpu")
    result = trident("train", "glyphs", "--out", "run", *short)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert "Files in run" in result.stderr
    arguments = ["evaluate", "run", "--tasks", "4", "--split", "test", "--query-order", "shuffled"]
    evaluated = here(*arguments, "--json")
    answer: dict[str, Any] = json.loads(evaluated.stdout)
    assert 0 <= answer["accuracy"] <= 100
    assert answer["ci95"] > 0
    protocol = answer["protocol"]
    assert protocol["dataset"] == "glyphs"
    assert (protocol["n_way"], protocol["n_shot"], protocol["n_query"], protocol["tasks"]) == (5, 1, 5, 4)
    assert (protocol["split"], protocol["query_order"], protocol["balance"]) == ("test", "shuffled", "balanced")
    assert (protocol["seed"], protocol["latents"], protocol["batch_norm"]) == (0, "mean", "transductive")
    in_words = here(*arguments)
    assert f"{answer['accuracy']:.2f} ± {answer['ci95']:.2f} %" in in_words.stdout
    assert "shuffled queries, balanced, transductive batch norm, latent means, 1 inner step, 4 tasks" in in_words.stdout
    again = here("train", "--resume", "run")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    "protocol",
    [
        ["--query-order", "class_sorted"],
        ["--balance", "dirichlet", "--dirichlet-alpha", "1.5"],
        ["--batch-norm", "support"],
        ["--batch-norm", "running"],
        ["--latents", "sample"],
        ["--latents", "average", "--latent-samples", "3"],
        ["--inner-steps", "0"],
    ],
)
def test_every_protocol_can_be_asked_for(here: Here, weights: Path, protocol: list[str]) -> None:
    result = here("evaluate", weights, "--tasks", "3", "--json", *protocol)
    assert result.returncode == 0, result.stderr
    answered = json.loads(result.stdout)["protocol"]
    key, value = protocol[0][2:].replace("-", "_"), protocol[1]
    if key == "inner_steps":
        assert answered["method"] == "no inner steps"
    else:
        assert str(answered[key]) == value


def test_every_command_measures_the_validation_classes_unless_it_is_told_otherwise() -> None:
    """So that nobody chooses settings on the test classes by mistake. Grids say their split; theirs is val, too."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    defaults = {
        name: option.default
        for name, command in commands.items()
        for option in command.params
        if option.name == "split"
    }
    measuring = ("evaluate", "report", "compare")
    assert defaults == dict.fromkeys(measuring, "val") | {"ablate": None}
    assert MeasuredOn().split == "val"


def test_prepare_and_show(here: Here, tmp_path: Path) -> None:
    for split, letter in (("train", "a"), ("val", "b"), ("test", "c")):
        for n in range(2):
            folder = tmp_path / "pictures" / split / f"{letter}{n}"
            folder.mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (30, 20), (10 * i, 99, 5)).save(folder / f"{i}.png")
    made = here("data", "prepare", "folder", "--from", "pictures", "--to", "pictures.store", "--image-size", "16")
    assert made.returncode == 0, made.stderr
    about = json.loads(here("data", "show", "pictures.store", "--json").stdout)
    assert about["splits"]["train"]["classes"] == 2
    assert about["images"] == 18
    assert "image_size 16" in " ".join(here("data", "show", "pictures.store", "--verify").stdout.split())
    content = bytearray((tmp_path / "pictures.store").read_bytes())
    content[-1] ^= 1
    (tmp_path / "pictures.store").write_bytes(content)
    assert_one_line_error(here("data", "show", "pictures.store", "--verify"), "is damaged")


def test_the_command_line_knows_every_dataset(here: Here) -> None:
    told = " ".join(here("data", "prepare", "--help").stdout.split())
    assert f"{', '.join(READERS)}." in told


def test_missing_folder(here: Here, tmp_path: Path) -> None:
    result = here("data", "prepare", "cub", "--from", "nowhere", "--to", "out.store")
    assert_one_line_error(result, "nowhere")
    assert files_in(tmp_path) == set()


def test_corrupt_jpeg(here: Here, tmp_path: Path) -> None:
    folder = tmp_path / "pictures" / "train" / "cat"
    folder.mkdir(parents=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(folder / "good.jpg")
    content = (folder / "good.jpg").read_bytes()
    (folder / "bad.jpg").write_bytes(content[: len(content) // 2])
    before = files_in(tmp_path)
    assert_one_line_error(here("data", "prepare", "folder", "--from", "pictures", "--to", "out.store"), "bad.jpg")
    assert files_in(tmp_path) == before


def test_class_in_two_splits(here: Here, tmp_path: Path) -> None:
    for split in ("train", "test"):
        folder = tmp_path / "pictures" / split / "cat"
        folder.mkdir(parents=True)
        Image.new("RGB", (20, 20)).save(folder / "1.png")
    before = files_in(tmp_path)
    assert_one_line_error(here("data", "prepare", "folder", "--from", "pictures", "--to", "o.store"), "cat", "both")
    assert files_in(tmp_path) == before


def test_malicious_pickle(here: Here, tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "attacked",))

    folder = tmp_path / "mini"
    folder.mkdir()
    for split in ("train", "val", "test"):
        (folder / f"mini-imagenet-cache-{split}.pkl").write_bytes(pickle.dumps(Attack()))
    before = files_in(tmp_path)
    assert_one_line_error(here("data", "prepare", "mini-imagenet", "--from", folder, "--to", "o.store"), "pathlib")
    assert files_in(tmp_path) == before


def test_too_few_images_in_a_class(here: Here, tmp_path: Path, store: Path) -> None:
    result = here("train", "mini-5w1s", "--data", store, "--out", "run", "backbone.image_size=16", "image_channels=1")
    assert_one_line_error(result, "has 8 images", "11 are needed")
    assert not (tmp_path / "run").exists()


def test_wrong_image_size_for_the_weights(here: Here, tmp_path: Path, weights: Path) -> None:
    assert_one_line_error(here("evaluate", weights, "--data", "glyphs"), "28x28", "16x16")


def test_weights_of_another_architecture(here: Here, tmp_path: Path, weights: Path) -> None:
    checkpoint = load_checkpoint(weights)
    del checkpoint.parameters["attfex.w_n.weight"]
    save_checkpoint(tmp_path / "other.safetensors", checkpoint)
    assert_one_line_error(here("evaluate", "other.safetensors"), "another architecture", "attfex.w_n.weight", "missing")
    wider = replace(TINY_RECIPE, backbone=replace(TINY_BACKBONE, channels=8))
    save_checkpoint(tmp_path / "wider.safetensors", replace(load_checkpoint(weights), recipe=wider))
    assert_one_line_error(here("evaluate", "wider.safetensors"), "another architecture")
    save_file({"layer.weight": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    assert_one_line_error(here("evaluate", "foreign.safetensors"), "another program")
    (tmp_path / "text.safetensors").write_text("hello")
    assert_one_line_error(here("evaluate", "text.safetensors"), "damaged or no safetensors file")


def test_tasks_the_weights_were_not_made_for(here: Here, weights: Path) -> None:
    assert_one_line_error(
        here("evaluate", weights, "--n-query", "3"), "positions in 3-way 2-shot tasks with 2 queries", "with 3"
    )
    swapped = here("evaluate", weights, "--n-shot", "1", "--n-query", "3")
    assert_one_line_error(swapped, "cannot take 3-way 1-shot tasks with 3")
    assert_one_line_error(here("evaluate", weights, "--n-way", "4"), "classify 3 ways, not 4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "glyphs", "--out", "run", "training.stesp=3"], ["'training.stesp'", "'training.steps'"]),
        (["train", "glyphs", "--out", "run", "--training.stesp", "3"], ["'training.stesp'", "'training.steps'"]),
        (["train", "glyph", "--out", "run"], ["'glyph'", "'glyphs'"]),
        (["train", "glyphs"], ["--out RUN"]),
        (["train"], ["which recipe"]),
        (["train", "mini-5w1s", "--out", "run"], ["--data STORE"]),
        (["train", "mini-5w1s", "--out", "run", "--data", "nowhere.store"], ["no store at"]),
        (["train", "--resume", "nowhere"], ["there is no run at nowhere"]),
        (["train", "glyphs", "--out", "run", "--device", "abacus"], ["'abacus' is not a device"]),
        (["train", "glyphs", "--out", "run", "--device", "cuda:99"], ["there is no cuda:99"]),
        (["train", "glyphs", "--out", "r" * 300], ["File name too long"]),
        (["train", "glyphs", "--out", "run", "method.initial_log_var=nan"], ["must be finite"]),
        (["evaluate", "nowhere"], ["no run or weights file at nowhere"]),
        (["evaluate", "nowhere", "--tasks", "1"], ["--tasks", "2"]),
        (["evaluate", "nowhere", "--split", "tset"], ["'tset'", "'test'"]),
        (["data", "show", "nowhere.store"], ["no store at"]),
        (["data", "prepare", "imagenet", "--from", ".", "--to", "x"], ["'imagenet'", "'mini-imagenet'"]),
        (["recipes", "mini-5w1s", "decoder_batch_norm=perhaps"], ["true or false"]),
        (["evaluate", "nowhere", "--also", "audit,calibratoin"], ["'calibration'"]),
        (["evaluate", "nowhere", "--out", "figure.svg"], ["--out is for a figure of --also"]),
        (["evaluate", "nowhere", "--also", "reconstructions"], ["--out reconstructions.png"]),
        (["fly"], ["fly"]),
        (["calibrate", "runs/a b"], ["type: trident evaluate 'runs/a b' --also calibration"]),
        (["params", "glyphs"], ["type: trident recipes glyphs"]),
        (["cache", "--clear"], ["type: trident data cache --clear"]),
        (
            ["predict", "--query", "pile", "--move=a"],
            ["type: trident sort labels.csv --to DIR --move"],
        ),
        (["bench", "train"], ["run 'python -m studies.speed'"]),
    ],
)
def test_mistakes_on_the_command_line(here: Here, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    assert_one_line_error(here(*arguments), *words)
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize("about", ["{", "{}", None])
def test_damaged_metadata(here: Here, tmp_path: Path, weights: Path, about: str | None) -> None:
    with safe_open(weights, "pt") as file:
        metadata = {key: value for key, value in {**file.metadata(), "trident": about}.items() if value is not None}
    save_file(load_file(weights), tmp_path / "broken.safetensors", metadata)
    assert_one_line_error(here("evaluate", "broken.safetensors"), "broken.safetensors", "damaged")


def test_predictions_that_are_not_finite_have_no_accuracy(here: Here, tmp_path: Path, weights: Path) -> None:
    checkpoint = load_checkpoint(weights)
    checkpoint.parameters["classifier.1.bias"].fill_(torch.nan)
    save_checkpoint(tmp_path / "nan.safetensors", checkpoint)
    assert_one_line_error(here("evaluate", "nan.safetensors", "--tasks", "3"), "val task 0", "not finite")


def test_a_damaged_log_does_not_stop_a_good_run(here: Here, tmp_path: Path) -> None:
    settings = ["training.steps=2", "tasks_per_step=1", "validation_tasks=2", "log_every=1"]
    assert here("train", "glyphs", "--out", "r[b]", *settings).returncode == 0
    log = tmp_path / "r[b]" / "log.jsonl"
    good = log.read_bytes()
    log.write_bytes(b'{"step": 1,}\n\xff\n{"a": 1}\n' + good + b'{"step": 1, "half')
    again = here("train", "--resume", "r[b]")
    assert again.returncode == 0, again.stderr
    assert "Files in r[b]" in again.stderr
    assert log.read_bytes() == good


def test_help_without_arguments(trident: Trident_command, here: Here) -> None:
    groups = "Label pictures|Train and measure|Compare|Weights and data"
    shown = trident().stdout
    assert re.findall(f"^({groups}):$", shown, re.MULTILINE) == groups.split("|")
    assert len(re.findall("^  [a-z]+  +[A-Z]", shown, re.MULTILINE)) == len(typer.main.get_command(app).commands) == 17  # type: ignore[attr-defined]
    for result in (trident(), here("data")):
        assert "Usage:" in result.stdout
        assert "error" not in result.stderr


def test_a_run_is_never_overwritten(here: Here, tmp_path: Path, weights: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(weights, tmp_path / "run" / "last.safetensors")
    assert_one_line_error(here("train", "glyphs", "--out", "run"), "already holds a run", "--resume run")


def test_a_folder_of_other_files_is_no_place_for_a_run(here: Here, tmp_path: Path) -> None:
    (tmp_path / "thesis" / "start").mkdir(parents=True)  # a stage's folder may be there
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    refused = here("train", "glyphs", "--out", "thesis")
    assert_one_line_error(refused, "thesis holds other files, such as chapter.tex", "choose a new or an empty folder")
    assert files_in(tmp_path) == {"thesis", "thesis/start", "thesis/chapter.tex"}


@pytest.mark.parametrize(
    "words",
    [
        *(["predict", "--query", "pile", option, ""] for option in ("--support", "--out")),
        *(["train", "glyphs", "--out="], ["train", "--resume", ""], ["evaluate", ""], ["leaderboard", "--results", ""]),
        ["sort", "labels.csv", "--to", ""],
    ],
    ids=" ".join,
)
def test_an_empty_word_does_not_mean_the_working_directory(here: Here, tmp_path: Path, words: list[str]) -> None:
    assert_one_line_error(here(*words), f"there is nothing after {words[-1] or words[-2]}", "of the shell not set?")
    assert files_in(tmp_path) == set()


def test_full_disk(trident: Trident_command, tmp_path: Path, store: Path) -> None:
    """A limit on the size of files makes the kernel refuse the write, as a full disk does."""
    recipe = tmp_path / "big.toml"
    episode, backbone = "n_way = 3\nn_query = 2", "image_size = 16\nimage_channels = 1"
    recipe.write_text(f'summary = "s"\ndataset = "noise"\n[episode]\n{episode}\n[backbone]\n{backbone}\n')
    before = files_in(tmp_path)
    limited = {"PYTHONPATH": str(tmp_path / "limit")}
    (tmp_path / "limit").mkdir()
    (tmp_path / "limit" / "sitecustomize.py").write_text(
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    )
    result = trident("train", recipe, "--data", store, "--out", "run", env=limited)
    assert_one_line_error(result, "cannot write", "last.safetensors", "File too large")
    left = {name for name in files_in(tmp_path) - before if not name.startswith("limit")}
    assert left == set()


def test_across_domains(here: Here, tmp_path: Path, weights: Path, store: Path) -> None:
    """Trained on one store, measured on another; the temperature comes from the one trained on."""
    other = tiny_store(images_per_class=9)
    write_store(tmp_path / "other.store", "other", other.classes, iter(other.images))
    measured = ["--data", "other.store", "--tasks", "4", "--json"]
    evaluated = json.loads(here("evaluate", weights, *measured).stdout)
    assert evaluated["protocol"]["dataset"] == "other"
    assert evaluated["weights"]["trained_on"] == "noise"
    said = here("evaluate", weights, "--data", "other.store", "--tasks", "4").stdout
    assert "other val" in said and "trained on noise" in said
    calibrated = json.loads(here(*CALIBRATE, weights, "--temperature-tasks", "3", *measured).stdout)
    assert calibrated["protocol"]["dataset"] == "other"
    assert calibrated["with_temperature"]["fitted_on"] == "validation"
    assert calibrated["with_temperature"]["fitted_tasks"] == "noise val, 3 tasks, seed 0"
    as_paper = here(*CALIBRATE, weights, "--temperature", "paper", "--data", "other.store", "--tasks", "4")
    assert "fitted on the very predictions that are scored" in as_paper.stdout
    store.unlink()
    lost = here(*CALIBRATE, weights, *measured)
    assert_one_line_error(lost, "noise.store", "--temperature-data")


@pytest.mark.parametrize("also", ["", "audit,calibration"])
def test_accuracy_on_the_classes_that_chose_the_weights_is_not_final(
    here: Here, weights: Path, store: Path, also: str
) -> None:
    untrained, noise = load_checkpoint(weights), open_store(store)
    trained = replace(untrained, best={"step": 0, "accuracy": 50.0, "ci95": 1.0, "tasks": 2})
    save_checkpoint(weights, trained)
    said = here("evaluate", weights, *(["--also", also] if also else []), "--tasks", "2", "--json")
    assert said.stderr.splitlines() == ["these classes chose the weights; --split test gives the final number"]
    assert json.loads(said.stdout)["weights"]
    other = replace(noise, dataset="other", fingerprint="another")
    assert trained.caution(noise, "val") and trained.caution(replace(other, dataset="noise"), "val")
    assert not (trained.caution(noise, "test") or trained.caution(other, "val") or untrained.caution(noise, "val"))


def test_exported_weights_are_calibrated_by_the_store_at_hand_if_it_is_theirs(
    here: Here, tmp_path: Path, weights: Path, store: Path
) -> None:
    """They do not know where the data they were trained on lie, but do know them when they see them."""
    here("export", weights, "--to", "shared.safetensors")
    assert load_checkpoint(tmp_path / "shared.safetensors").provenance["data"] is None
    few = ["--tasks", "4", "--temperature-tasks", "3", "--json"]
    own = json.loads(here(*CALIBRATE, "shared.safetensors", "--data", store, *few).stdout)
    others = "noise val, 3 other tasks of the classes that are scored, seed 0"
    assert own["with_temperature"]["fitted_tasks"] == others
    other = tiny_store(images_per_class=9)
    write_store(tmp_path / "other.store", "other", other.classes, iter(other.images))
    unknown = here(*CALIBRATE, "shared.safetensors", "--data", "other.store", *few)
    assert_one_line_error(unknown, "data trained on, noise", "--temperature-data")
    both = here(*CALIBRATE, "shared.safetensors", "--temperature", "none", "--temperature-data", store)
    assert_one_line_error(both, "--temperature-data is for --temperature validation")
    named = here(*CALIBRATE, "shared.safetensors", "--data", "other.store", "--temperature-data", store, *few)
    assert json.loads(named.stdout)["with_temperature"] != own["with_temperature"]
    assert json.loads(named.stdout)["with_temperature"]["fitted_tasks"] == "noise val, 3 tasks, seed 0"


def test_without_a_terminal_long_work_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(console, "monotonic", lambda: now[0])
    with console.Counter("evaluating tasks") as progress:
        for done, seconds in ((1, 59.0), (2, 60.0), (3, 119.0), (4, 121.0)):
            now[0] = seconds
            progress(done, 600, "another protocol" if done == 4 else None)
    assert capsys.readouterr().err.splitlines() == ["evaluating tasks: 2 of 600", "another protocol: 4 of 600"]
