"""Training runs: repeatable, resumable bit for bit, safe against kills, interrupts and numbers that blow up."""

import ctypes
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conftest import TINY_RECIPE, tiny_store
from trident.data.store import ImageStore, write_store
from trident.engines.execution import make_model
from trident.errors import TridentError
from trident.learning.checkpoint import BEST, LAST, Checkpoint, load_checkpoint
from trident.learning.inner_loop import Learner, TaskBatch
from trident.learning.run_start import resume_run, start_run
from trident.learning.training import train
from trident.measuring.evaluate import Evaluation, evaluate
from trident.methods.trident.network import Trident
from trident.settings import Recipe
from trident.tasks.episodes import EpisodeSampler
from trident.tasks.source import TaskSource


class Silent:
    """Watches nothing; `interrupt_at` presses Ctrl-C in a step, or sends other signals."""

    def __init__(self, interrupt_at: int | None = None, signals: tuple[int, ...] = (signal.SIGINT,)):
        self.interrupt_at = interrupt_at
        self.signals = signals

    def on_step(self, step: int, values: dict[str, float]) -> None:
        if step == self.interrupt_at:
            for number in self.signals:
                os.kill(os.getpid(), number)

    def on_validation(self, step: int, evaluation: Evaluation, best: bool) -> None:
        pass


def run(
    out: Path, recipe: Recipe = TINY_RECIPE, store: ImageStore | None = None, observer: Silent | None = None
) -> Checkpoint:
    store = store or tiny_store()
    return train(start_run(recipe, store, "noise", out, "cpu"), store, out, "cpu", observer or Silent())


def assert_same_weights(one: Checkpoint, other: Checkpoint) -> None:
    for group in ("parameters", "running", "optimizer"):
        mine, theirs = getattr(one, group), getattr(other, group)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), group


def test_the_same_seed_gives_the_same_weights_after_20_steps(tmp_path: Path) -> None:
    one, same = run(tmp_path / "one"), run(tmp_path / "same")
    assert one.step == 20
    assert_same_weights(one, same)
    other = run(tmp_path / "other", replace(TINY_RECIPE, training=replace(TINY_RECIPE.training, seed=1)))
    assert not torch.equal(one.parameters["label.loc.weight"], other.parameters["label.loc.weight"])


def test_best_weights_are_chosen_on_tasks_of_their_own(tmp_path: Path) -> None:
    """Else every later figure on validation classes, with the same seed, would flatter the chosen weights."""
    recipe, store = replace(TINY_RECIPE, training=replace(TINY_RECIPE.training, validation_tasks=40)), tiny_store()
    run(tmp_path / "run", recipe, store)
    best = load_checkpoint(tmp_path / "run" / BEST)
    assert best.best is not None
    found = {}
    for stream in ("selection", "val"):
        weights = (recipe, best.parameters, best.running, store)
        found[stream] = evaluate(*weights, split="val", tasks=40, seed=0, stream=stream).predictions
    assert found["selection"].accuracies.mean() == pytest.approx(best.best["accuracy"])
    assert not np.array_equal(found["selection"].labels, found["val"].labels)


def test_running_statistics_forget_where_they_started(tmp_path: Path) -> None:
    recipe = replace(TINY_RECIPE, training=replace(TINY_RECIPE.training, steps=1))
    end = run(tmp_path / "run", recipe)
    start = Trident(recipe.model, recipe.episode).initial_running()
    changed = end.running["label_encoder.0.norm.variance"] / start["label_encoder.0.norm.variance"]
    learner = Learner(Trident(recipe.model, recipe.episode), recipe.objective, recipe.adaptation)
    source = TaskSource(
        EpisodeSampler(tiny_store(), "train", recipe.episode, recipe.protocol),
        recipe.model,
        recipe.adaptation,
        0,
        "train",
    )
    seen = learner.meta_gradient(learner.model.initial(0), source.batch(range(2))).statistics
    torch.testing.assert_close(changed, seen["label_encoder.0.norm.variance"].mean(0))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_ten_steps_resume_ten_steps_are_twenty(tmp_path: Path, schedule: str) -> None:
    recipe = replace(TINY_RECIPE, training=replace(TINY_RECIPE.training, schedule=schedule))  # type: ignore[arg-type]
    store = tiny_store()
    whole = run(tmp_path / "whole", recipe)
    half = run(tmp_path / "half", recipe, observer=Silent(interrupt_at=10))
    assert half.step == 10
    checkpoint = load_checkpoint(tmp_path / "half" / LAST)
    resumed = train(resume_run(checkpoint, store, tmp_path / "half"), store, tmp_path / "half", "cpu", Silent())
    assert_same_weights(whole, resumed)
    assert_same_weights(load_checkpoint(tmp_path / "whole" / LAST), load_checkpoint(tmp_path / "half" / LAST))
    assert whole.best == resumed.best
    steps = [json.loads(line)["step"] for line in (tmp_path / "half" / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_a_request_to_terminate_may_come_twice_but_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    twice = Silent(interrupt_at=7, signals=(signal.SIGTERM, signal.SIGTERM))  # as `timeout` does
    assert run(tmp_path / "twice", observer=twice).step == 7
    assert load_checkpoint(tmp_path / "twice" / LAST).step == 7
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "at once", observer=Silent(interrupt_at=7, signals=(signal.SIGTERM, signal.SIGINT)))


def test_a_compiler_s_signal_handlers_do_not_last(tmp_path: Path) -> None:
    """LLVM, at work in Triton, puts handlers of its own over Python's, unseen by Python."""

    class Compiling(Silent):
        def on_step(self, step: int, values: dict[str, float]) -> None:
            if step == 5:
                ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_IGN))
            super().on_step(step, values)

    stopped = run(tmp_path, observer=Compiling(interrupt_at=7, signals=(signal.SIGTERM,)))
    assert stopped.step == load_checkpoint(tmp_path / LAST).step == 7


def test_a_validation_that_was_interrupted_is_made_up_for(tmp_path: Path) -> None:
    """Stopped before its validation: the step is saved, and resuming starts with the validation it owes."""
    store = tiny_store()
    whole = run(tmp_path / "whole")
    run(tmp_path / "half", observer=Silent(interrupt_at=10))
    stopped = load_checkpoint(tmp_path / "half" / LAST)
    assert (stopped.step, stopped.validated_step, stopped.best) == (10, 0, None)
    resumed = train(stopped, store, tmp_path / "half", "cpu", Silent())
    assert resumed.best == whole.best
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "half" / "log.jsonl").read_text().splitlines()]
    assert kinds.count("validation") == 2


def test_chunks_of_the_meta_batch_give_the_same_result(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    chunked = run(tmp_path / "chunked", replace(TINY_RECIPE, training=replace(TINY_RECIPE.training, tasks_per_chunk=1)))
    for key, value in whole.parameters.items():
        torch.testing.assert_close(value, chunked.parameters[key], rtol=1e-3, atol=1e-4)


def test_training_tasks_may_be_larger(tmp_path: Path) -> None:
    settings = replace(TINY_RECIPE.training, steps=2, validate_every=2, task_ways=5, task_queries=3, task_refinements=0)
    recipe = replace(TINY_RECIPE, training=settings)
    with pytest.raises(
        TridentError, match=r"training tasks are 5-way 2-shot, but these weights classify 3 ways, not 5"
    ):
        start_run(recipe, tiny_store(), "noise", tmp_path / "learned", "cpu")
    assert not (tmp_path / "learned").exists()
    model = replace(recipe.model, classifier_start="prototypes", attfex="set")
    end = run(tmp_path / "any", replace(recipe, model=model, adaptation=replace(recipe.adaptation, refinements=1)))
    assert end.best is not None
    assert (end.best["protocol"]["n_way"], end.best["protocol"]["n_query"]) == (3, 2)


def test_learning_happens(tmp_path: Path) -> None:
    """Patterns with a little noise are easy: chance is 33 %, and a few steps get far above it."""
    training = replace(TINY_RECIPE.training, steps=120, rate=1e-2, validation_tasks=40)
    recipe = replace(TINY_RECIPE, training=training, model=replace(TINY_RECIPE.model, initial_log_var=-4.0))
    end = run(tmp_path / "run", recipe)
    assert end.best is not None
    assert end.best["accuracy"] > 75


def test_the_best_weights_are_kept_and_ready_for_use(tmp_path: Path) -> None:
    end = run(tmp_path / "run")
    best = load_checkpoint(tmp_path / "run")
    assert end.best is not None
    assert best.step == end.best["step"]
    assert best.optimizer == {}
    assert best.recipe == TINY_RECIPE
    assert best.provenance["fingerprint"] == tiny_store().fingerprint
    assert set(load_file(tmp_path / "run" / BEST)) >= {
        "parameters/label.loc.weight",
        "running/label_encoder.0.norm.mean",
    }


def test_logs_hold_every_part_of_the_loss(tmp_path: Path) -> None:
    run(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == list(range(2, 21, 2))
    parts = {"total", "classification", "reconstruction", "label_kl", "semantic_kl", "accuracy"}
    assert parts <= lines[0].keys()
    validations = [line for line in lines if line["kind"] == "validation"]
    assert [line["step"] for line in validations] == [10, 20]
    assert validations[0]["protocol"]["query_order"] == "shuffled"
    assert any((tmp_path / "run" / "tensorboard").iterdir())


def test_running_statistics_follow_the_batches(tmp_path: Path) -> None:
    end = run(tmp_path / "run")
    fresh = make_model(end.recipe).initial_running()
    assert all(not torch.equal(end.running[key], fresh[key]) for key in fresh)


@pytest.mark.parametrize("poison", ["inner rate", "meta rate"])
def test_numbers_that_blow_up_stop_the_run_and_spare_the_weights(tmp_path: Path, poison: str) -> None:
    if poison == "inner rate":
        recipe = replace(TINY_RECIPE, adaptation=replace(TINY_RECIPE.adaptation, rate=1e20))
    else:
        recipe = replace(TINY_RECIPE, training=replace(TINY_RECIPE.training, rate=1e18))
    with pytest.raises(TridentError, match=r"step \d+: the .* is not finite"):
        run(tmp_path / "run", recipe)
    kept = load_checkpoint(tmp_path / "run" / LAST)
    assert all(bool(torch.isfinite(value).all()) for value in kept.parameters.values())


def test_a_task_that_blows_up_is_left_out_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = TaskSource.batch

    def poisoned(source: TaskSource, indices: Sequence[int]) -> TaskBatch:
        tasks = draw(source, indices)
        if source.stream == "train" and 7 in indices:
            tasks.query_noise[0].label[list(indices).index(7)] = float("inf")
        return tasks

    monkeypatch.setattr(TaskSource, "batch", poisoned)
    tolerant, strict = (
        replace(TINY_RECIPE, training=replace(TINY_RECIPE.training, most_left_out=share, log_every=1))
        for share in (0.5, 0.0)
    )
    end = run(tmp_path / "run", tolerant)
    step = 7 // TINY_RECIPE.training.tasks_per_step + 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert {line["step"]: line["left_out"] for line in lines if line["kind"] == "train" and line["left_out"]} == {
        step: 1
    }
    totals = {line["step"]: line["total"] for line in lines if line["kind"] == "train"}
    assert all(math.isfinite(total) for total in totals.values())
    assert totals[step] == pytest.approx(totals[step - 1], rel=0.4)  # a mean over the tasks that are left
    for group in (end.parameters, end.running):
        assert all(bool(torch.isfinite(value).all()) for value in group.values())
    with pytest.raises(TridentError, match=f"step {step}: the classification loss is not finite"):
        run(tmp_path / "strict", strict)


def test_other_data_are_refused_on_resume(tmp_path: Path) -> None:
    run(tmp_path / "run")
    with pytest.raises(TridentError, match="trained on other data"):
        resume_run(load_checkpoint(tmp_path / "run" / LAST), tiny_store(images_per_class=9), tmp_path / "run")


RECIPE = """
summary = "for tests"
dataset = "noise"
[episode]
n_way = 3
n_shot = 2
n_query = 2
[model]
image_size = 16
image_channels = 1
channels = 4
label_latents = 5
semantic_latents = 6
[adaptation]
steps = 1
[training]
steps = 1000000
tasks_per_step = 2
validate_every = 7
validation_tasks = 2
save_every = 1
log_every = 1
"""


@pytest.fixture
def command_line_run(tmp_path: Path) -> list[str]:
    store = tiny_store()
    write_store(tmp_path / "noise.store", "noise", store.classes, iter(store.images))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    data = ["--data", str(tmp_path / "noise.store")]
    return [
        sys.executable,
        "-m",
        "trident",
        "train",
        str(tmp_path / "recipe.toml"),
        "--out",
        str(tmp_path / "run"),
        *data,
    ]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"{path} never came")


def test_thirty_kills_at_random_moments(tmp_path: Path, command_line_run: list[str]) -> None:
    """kill -9 while checkpoints are written at every step: the run resumes each time, and never loses a saved step."""
    generator = random.Random(0)
    command = command_line_run
    last, reached = tmp_path / "run" / LAST, 0
    for _ in range(30):
        before = last.stat().st_mtime_ns if last.exists() else 0
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_for(last, process)
        while last.stat().st_mtime_ns == before and process.poll() is None:
            time.sleep(0.01)  # until this process has saved a step of its own
        time.sleep(generator.uniform(0, 0.3))
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGKILL)
        process.wait()
        step = load_checkpoint(last).step
        assert step >= reached
        reached = step
        command = [sys.executable, "-m", "trident", "train", "--resume", str(tmp_path / "run")]
    # Each process saved at least one step, but for the first, whose first checkpoint is from before any.
    assert reached >= 29
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert len(lines) >= 29


def test_ctrl_c_saves_and_exits_cleanly(tmp_path: Path, command_line_run: list[str]) -> None:
    process = subprocess.Popen(command_line_run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "run" / "log.jsonl", process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    step = load_checkpoint(tmp_path / "run" / LAST).step
    assert f"stopped after step {step}; go on with: trident train --resume" in err
    assert out == ""
