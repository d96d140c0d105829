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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conftest import TINY_METHOD, TINY_RECIPE, Silent, source_for, tiny_store
from trident.cli.console import TrainingProgress
from trident.data.store import ImageStore, write_store
from trident.engines.execution import Execution
from trident.errors import TridentError
from trident.files import atomic_file
from trident.learning import training
from trident.learning.checkpoint import BEST, LAST, Checkpoint, load_checkpoint
from trident.learning.heads import HeadLearner
from trident.learning.inner_loop import InnerLoopLearner
from trident.learning.learners import make_learner
from trident.learning.meta_update import make_optimizer, update
from trident.learning.run_start import resume_run, start_run
from trident.learning.training import Observer, train, training_source
from trident.measuring.evaluate import evaluate_subject
from trident.measuring.subject import subject_of
from trident.measuring.validation import validate
from trident.methods.base import Losses, cross_entropy
from trident.methods.protonet import ProtoNet
from trident.methods.registry import METHODS
from trident.methods.simpleshot import SimpleShot
from trident.nn.parameters import Parameters
from trident.recipes.recipe import Recipe
from trident.settings import Protocol, TrainingSettings
from trident.tasks.source import TaskSource
from trident.tasks.task import Batch, Labels


class Interrupting(Silent):
    """Presses Ctrl-C in a step, or sends other signals."""

    def __init__(self, interrupt_at: int, signals: tuple[int, ...] = (signal.SIGINT,)):
        self.interrupt_at = interrupt_at
        self.signals = signals

    def on_step(self, step: int, values: dict[str, Any]) -> None:
        if step == self.interrupt_at:
            for number in self.signals:
                os.kill(os.getpid(), number)


def with_training(recipe: Recipe = TINY_RECIPE, **settings: Any) -> Recipe:
    """A recipe with other settings of training."""
    return replace(recipe, training=replace(recipe.training, **settings))


def run(
    out: Path, recipe: Recipe = TINY_RECIPE, store: ImageStore | None = None, observer: Observer | None = None
) -> Checkpoint:
    store = store or tiny_store()
    return train(start_run(recipe, store, "noise", out, "cpu"), store, out, "cpu", observer or Silent(), validate)


def resume(out: Path, store: ImageStore) -> Checkpoint:
    start = resume_run(load_checkpoint(out / LAST), store, out)
    return train(start, store, out, "cpu", Silent(), validate)


def log_of(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


QUICK = replace(TINY_RECIPE, method=replace(TINY_METHOD, inner_steps=0))  # where the inner steps do not matter


class Whole(NamedTuple):
    """A run of TINY_RECIPE from its first step to its last."""

    folder: Path
    end: Checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole") / "run"
    return Whole(folder, run(folder))


def assert_same_weights(one: Checkpoint, other: Checkpoint) -> None:
    for group in ("parameters", "running", "optimizer"):
        mine, theirs = getattr(one, group), getattr(other, group)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), group


def test_the_same_seed_gives_the_same_weights_after_20_steps(tmp_path: Path, whole: Whole) -> None:
    same = run(tmp_path / "same")
    assert whole.end.step == 20
    assert_same_weights(whole.end, same)
    one, other = (run(tmp_path / str(seed), with_training(QUICK, seed=seed)) for seed in (0, 1))
    assert not torch.equal(one.parameters["label.loc.weight"], other.parameters["label.loc.weight"])


def test_best_weights_are_chosen_on_tasks_of_their_own(tmp_path: Path) -> None:
    """Else every later figure on validation classes, with the same seed, would flatter the chosen weights."""
    recipe, store = with_training(QUICK, validation_tasks=40), tiny_store()
    run(tmp_path / "run", recipe, store)
    best = load_checkpoint(tmp_path / "run" / BEST)
    assert best.best is not None
    found = {}
    for stream in ("selection", "val"):
        result = evaluate_subject(subject_of(best), store, None, stream, split="val", tasks=40, seed=0)
        found[stream] = result.predictions
    assert found["selection"].accuracies.mean() == pytest.approx(best.best["accuracy"])
    assert not np.array_equal(found["selection"].labels, found["val"].labels)


def test_running_statistics_forget_where_they_started(tmp_path: Path) -> None:
    recipe = with_training(steps=1)
    end = run(tmp_path / "run", recipe)
    learner = InnerLoopLearner(recipe.model)  # type: ignore[arg-type]
    seen = learner.gradient(recipe.initial(0), source_for(recipe, tiny_store()).batch(range(2))).statistics
    name = "backbone.0.norm.variance"
    torch.testing.assert_close(end.running[name], seen[name].mean(0))


def assert_resumed_as_one(whole: Whole, out: Path, recipe: Recipe) -> None:
    half = run(out, recipe, observer=Interrupting(10))
    assert half.step == 10
    resumed = resume(out, tiny_store())
    assert_same_weights(whole.end, resumed)
    assert_same_weights(load_checkpoint(whole.folder / LAST), load_checkpoint(out / LAST))
    assert whole.end.best == resumed.best
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_ten_steps_resume_ten_steps_are_twenty(tmp_path: Path, whole: Whole) -> None:
    assert_resumed_as_one(whole, tmp_path / "half", TINY_RECIPE)


def test_the_same_with_a_rate_that_depends_on_the_step(tmp_path: Path) -> None:
    recipe = with_training(QUICK, schedule="cosine")
    whole = Whole(tmp_path / "whole", run(tmp_path / "whole", recipe))
    assert_resumed_as_one(whole, tmp_path / "half", recipe)


def test_a_request_to_terminate_may_come_twice_but_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    twice = Interrupting(7, signals=(signal.SIGTERM, signal.SIGTERM))  # as `timeout` does
    assert run(tmp_path / "twice", QUICK, observer=twice).step == 7
    assert load_checkpoint(tmp_path / "twice" / LAST).step == 7
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "at once", QUICK, observer=Interrupting(7, signals=(signal.SIGTERM, signal.SIGINT)))


def test_a_compiler_s_signal_handlers_do_not_last(tmp_path: Path) -> None:
    """LLVM, at work in Triton, puts handlers of its own over Python's, unseen by Python."""

    class Compiling(Interrupting):
        def on_step(self, step: int, values: dict[str, Any]) -> None:
            if step == 5:
                ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_IGN))
            super().on_step(step, values)

    stopped = run(tmp_path, QUICK, observer=Compiling(7, signals=(signal.SIGTERM,)))
    assert stopped.step == load_checkpoint(tmp_path / LAST).step == 7


def test_a_validation_that_was_interrupted_is_made_up_for(tmp_path: Path) -> None:
    """Stopped before its validation: the step is saved, and resuming starts with the validation it owes."""
    store = tiny_store()
    whole = run(tmp_path / "whole", QUICK)
    run(tmp_path / "half", QUICK, observer=Interrupting(10))
    stopped = load_checkpoint(tmp_path / "half" / LAST)
    assert (stopped.step, stopped.validated_step, stopped.best) == (10, 0, None)
    resumed = train(stopped, store, tmp_path / "half", "cpu", Silent(), validate)
    assert resumed.best == whole.best
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "half" / "log.jsonl").read_text().splitlines()]
    assert kinds.count("validation") == 2


@pytest.mark.soak
def test_chunks_of_the_meta_batch_give_the_same_result(tmp_path: Path, whole: Whole) -> None:
    chunked = run(tmp_path / "chunked", with_training(tasks_per_chunk=1))
    for key, value in whole.end.parameters.items():
        torch.testing.assert_close(value, chunked.parameters[key], rtol=1e-3, atol=1e-4)


def test_training_tasks_may_be_larger(tmp_path: Path) -> None:
    recipe = with_training(steps=2, validate_every=2, task_ways=5, task_queries=3)
    with pytest.raises(
        TridentError, match=r"training tasks are 5-way 2-shot, but these weights classify 3 ways, not 5"
    ):
        start_run(recipe, tiny_store(), "noise", tmp_path / "learned", "cpu")
    assert not (tmp_path / "learned").exists()
    any_way = replace(TINY_METHOD, classifier_start="prototypes", attfex="set", refinements=1, training_refinements=0)
    end = run(tmp_path / "any", replace(recipe, method=any_way))
    assert end.best is not None
    assert (end.best["protocol"]["n_way"], end.best["protocol"]["n_query"]) == (3, 2)


def test_learning_happens(tmp_path: Path) -> None:
    """Patterns with a little noise are easy: chance is 33 %, and a few steps get far above it."""
    recipe = with_training(steps=26, rate=3e-2, validation_tasks=20, validate_every=26)
    end = run(tmp_path / "run", replace(recipe, method=replace(TINY_METHOD, initial_log_var=-4.0)))
    assert end.best is not None
    assert end.best["accuracy"] > 75


def test_the_best_weights_are_kept_and_ready_for_use(whole: Whole) -> None:
    end, best = whole.end, load_checkpoint(whole.folder)
    assert end.best is not None
    assert best.step == end.best["step"]
    assert best.optimizer == {}
    assert best.recipe == TINY_RECIPE
    assert best.provenance["fingerprint"] == tiny_store().fingerprint
    assert set(load_file(whole.folder / BEST)) >= {
        "parameters/label.loc.weight",
        "running/backbone.0.norm.mean",
    }


def test_logs_hold_every_part_of_the_loss(whole: Whole) -> None:
    lines = log_of(whole.folder, "train")
    assert [line["step"] for line in lines] == list(range(2, 21, 2))
    parts = {"total", "classification", "reconstruction", "label_kl", "semantic_kl"}
    assert parts <= lines[0]["losses"].keys()
    assert {"accuracy", "gradient_norm", "left_out", "rate", "seconds"} <= lines[0].keys()
    validations = log_of(whole.folder, "validation")
    assert [line["step"] for line in validations] == [10, 20]
    assert validations[0]["protocol"]["query_order"] == "shuffled"
    assert any((whole.folder / "tensorboard").iterdir())


def test_running_statistics_follow_the_batches(whole: Whole) -> None:
    end = whole.end
    fresh = end.recipe.model.initial_running()
    assert all(not torch.equal(end.running[key], fresh[key]) for key in fresh)


@pytest.mark.parametrize("poison", ["inner rate", "meta rate"])
def test_numbers_that_blow_up_stop_the_run_and_spare_the_weights(tmp_path: Path, poison: str) -> None:
    if poison == "inner rate":
        recipe = replace(TINY_RECIPE, method=replace(TINY_METHOD, inner_rate=1e9))
    else:
        recipe = with_training(rate=1e9)
    with pytest.raises(TridentError, match=r"step \d+: the .* is not finite"):
        run(tmp_path / "run", recipe)
    kept = load_checkpoint(tmp_path / "run" / LAST)
    assert all(bool(torch.isfinite(value).all()) for value in kept.parameters.values())


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> int:
    """A training task whose loss is not finite; the fixture's value is the step it falls into."""
    draw = TaskSource.batch

    def with_poison(source: TaskSource, indices: Sequence[int]) -> Batch:
        batch = draw(source, indices)
        if source.stream == "train" and 7 in indices:
            batch.task.noise["query/0/label"][list(indices).index(7)] = float("inf")
        return batch

    monkeypatch.setattr(TaskSource, "batch", with_poison)
    return 7 // TINY_RECIPE.training.tasks_per_step + 1


def test_a_task_that_blows_up_is_left_out_where_that_is_allowed(tmp_path: Path, poisoned: int) -> None:
    tolerant, strict = (with_training(QUICK, most_left_out=share, log_every=1) for share in (0.5, 0.0))
    end = run(tmp_path / "run", tolerant)
    lines = log_of(tmp_path / "run", "train")
    assert {line["step"]: line["left_out"] for line in lines if line["left_out"]} == {poisoned: 1}
    totals = {line["step"]: line["losses"]["total"] for line in lines}
    assert all(math.isfinite(total) for total in totals.values())
    assert totals[poisoned] == pytest.approx(totals[poisoned - 1], rel=0.4)  # a mean over the tasks that are left
    for group in (end.parameters, end.running):
        assert all(bool(torch.isfinite(value).all()) for value in group.values())
    with pytest.raises(TridentError, match=f"step {poisoned}: the classification loss is not finite"):
        run(tmp_path / "strict", strict)


def test_the_gradient_is_a_mean_over_the_tasks_that_are_kept(
    tmp_path: Path, poisoned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    def watched(
        parameters: Parameters, optimizer: torch.optim.AdamW, gradient: Parameters, norm: float, tasks: int, *rest: Any
    ) -> None:
        update(parameters, optimizer, gradient, norm, tasks, *rest)
        counts.append(tasks)
        for key, value in parameters.items():
            assert value.grad is not None
            torch.testing.assert_close(value.grad, gradient[key] / tasks)

    monkeypatch.setattr(training, "update", watched)
    run(tmp_path / "run", with_training(QUICK, steps=6, most_left_out=0.5, clip_norm=None))
    assert counts == [1 if step == poisoned else 2 for step in range(1, 7)]


@pytest.mark.parametrize(
    ("clip_norm", "applies_to", "factor"),
    [(None, "sum", 1 / 4), (1.0, "sum", 1 / 5 / 4), (1.0, "mean", 1 / (5 / 4) / 4), (2.0, "mean", 1 / 4)],
)
def test_a_step_clips_and_divides_by_the_number_of_tasks_it_is_given(
    clip_norm: float | None, applies_to: Any, factor: float
) -> None:
    settings = TrainingSettings(tasks_per_step=20, clip_norm=clip_norm, clip_applies_to=applies_to)
    parameters = {"weight": torch.zeros(2, requires_grad=True)}
    optimizer = make_optimizer(parameters, Checkpoint(replace(TINY_RECIPE, training=settings), {}, {}, 0))
    gradient = {"weight": torch.tensor([3.0, 4.0])}
    update(parameters, optimizer, gradient, 5.0, 4, 0.1, settings)
    assert parameters["weight"].grad is not None
    torch.testing.assert_close(parameters["weight"].grad, factor * gradient["weight"])


@dataclass(frozen=True)
class TwoParts(ProtoNet):
    """A method whose loss has parts with names of its own."""

    def losses(self, logits: torch.Tensor, labels: Labels) -> Losses:
        odd_name, other_name = cross_entropy(logits, labels.queries), logits.square().mean((1, 2))
        return {"total": odd_name + 0.1 * other_name, "odd_name": odd_name, "other_name": other_name}


TWO_PARTS = replace(with_training(steps=3, validate_every=3, log_every=1), method=TwoParts())


def test_losses_come_under_the_names_that_the_method_gives() -> None:
    learner = HeadLearner(TWO_PARTS.model)  # type: ignore[arg-type]
    found = learner.gradient(TWO_PARTS.initial(0), source_for(TWO_PARTS, tiny_store()).batch(range(2)))
    assert list(found.losses) == ["total", "odd_name", "other_name"]
    torch.testing.assert_close(found.losses["total"], found.losses["odd_name"] + 0.1 * found.losses["other_name"])


def test_the_names_of_losses_reach_the_log_and_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(METHODS, "two-parts", f"{TwoParts.__module__}:{TwoParts.__qualname__}")
    with TrainingProgress(0, 3) as progress:
        run(tmp_path / "run", TWO_PARTS, observer=progress)
    first, *_ = log_of(tmp_path / "run", "train")
    assert list(first["losses"]) == ["total", "odd_name", "other_name"]
    said = capsys.readouterr().err
    assert f"loss {first['losses']['total']:.4g}: odd name {first['losses']['odd_name']:.3g}, other name" in said
    assert "classification" not in said
    assert load_checkpoint(tmp_path / "run").recipe.method == TwoParts()


SIMPLESHOT = replace(
    with_training(images_per_step=12),
    method=SimpleShot(training_classes=5),
    protocol=Protocol(batch_norm="running"),
)


def test_simpleshot_trains_on_batches_of_all_classes(tmp_path: Path) -> None:
    store = tiny_store()
    whole = run(tmp_path / "whole", SIMPLESHOT, store)
    lines = log_of(tmp_path / "whole", "train")
    assert [line["step"] for line in lines] == list(range(2, 21, 2))
    assert lines[-1]["losses"]["total"] < lines[0]["losses"]["total"] < 3
    assert whole.best is not None
    assert whole.best["protocol"]["batch_norm"] == "running"
    assert {line["protocol"]["batch_norm"] for line in log_of(tmp_path / "whole", "validation")} == {"running"}
    half = run(tmp_path / "half", SIMPLESHOT, store, Interrupting(10))
    assert half.step == 10
    assert_same_weights(whole, resume(tmp_path / "half", store))
    assert_same_weights(load_checkpoint(tmp_path / "whole" / LAST), load_checkpoint(tmp_path / "half" / LAST))


def test_simpleshot_keeps_the_mean_feature_of_its_training_images(tmp_path: Path) -> None:
    recipe, store = with_training(SIMPLESHOT, steps=1), tiny_store()
    batch = training_source(recipe, store, "cpu").batch([0])
    assert (batch.task.n_tasks, batch.task.n_support, batch.task.n_queries, batch.task.n_way) == (1, 0, 12, 5)
    assert len(np.unique(batch.labels.queries)) > TINY_RECIPE.episode.n_way  # of all classes, not of one task's
    end = run(tmp_path / "run", recipe, store)
    learner = make_learner(recipe.in_training(), Execution())
    assert isinstance(learner, HeadLearner)
    features, _ = learner.features(recipe.initial(0), batch.task)
    torch.testing.assert_close(end.running["mean_feature"], features[0].mean(0))
    kept = load_checkpoint(tmp_path / "run" / BEST).running["mean_feature"]
    assert torch.equal(kept, end.running["mean_feature"])


def test_simpleshot_wants_to_know_all_training_classes(tmp_path: Path) -> None:
    with pytest.raises(TridentError, match="training_classes is 4, but noise has 5 training classes"):
        run(tmp_path / "run", replace(SIMPLESHOT, method=SimpleShot(training_classes=4)))
    assert not (tmp_path / "run").exists()


def test_other_data_are_refused_on_resume(whole: Whole) -> None:
    with pytest.raises(TridentError, match="trained on other data"):
        resume_run(load_checkpoint(whole.folder / LAST), tiny_store(images_per_class=9), whole.folder)


RECIPE = """
summary = "for tests"
dataset = "noise"
[episode]
n_way = 3
n_shot = 2
n_query = 2
[backbone]
image_size = 16
image_channels = 1
channels = 4
[method]
label_latents = 5
semantic_latents = 6
inner_steps = 1
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


WRITER = """
import sys
from pathlib import Path
from trident.files import atomic_file

assert "torch" not in sys.modules
path = Path(sys.argv[1])
number = int(path.read_bytes()[:8]) if path.exists() else 0
while True:
    number += 1
    with atomic_file(path) as file:
        for _ in range(20_000):
            file.write(b"%08d" % number)
    print(number, flush=True)
"""


def test_thirty_kills_while_a_file_is_written(tmp_path: Path) -> None:
    """kill -9 at random moments: the file is always whole, and what was once written is never lost."""
    generator, path, reached = random.Random(0), tmp_path / "file", 0
    for _ in range(30):
        process = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert int(process.stdout.readline()) == reached + 1
        time.sleep(generator.uniform(0, 0.05))
        process.kill()
        told = [reached + 1, *map(int, process.stdout.read().split("\n")[:-1])]
        process.wait()
        process.stdout.close()
        content = path.read_bytes()
        reached = int(content[:8])
        assert content == b"%08d" % reached * 20_000
        assert reached - told[-1] in (0, 1)  # it may have been killed before it could tell
    with atomic_file(path) as file:
        file.write(b"the end")
    assert [found.name for found in tmp_path.iterdir()] == ["file"]  # half files of killed processes are gone


@pytest.mark.soak
def test_three_kills_at_random_moments(tmp_path: Path, command_line_run: list[str]) -> None:
    """kill -9 while checkpoints are written at every step: the run resumes each time, and never loses a saved step."""
    generator = random.Random(0)
    command = command_line_run
    last, reached = tmp_path / "run" / LAST, 0
    for _ in range(3):
        before = last.stat().st_mtime_ns if last.exists() else 0
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_for(last, process)
        while last.stat().st_mtime_ns == before and process.poll() is None:
            time.sleep(0.01)  # until this process has saved a step of its own
        time.sleep(generator.uniform(0, 0.3))
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        step = load_checkpoint(last).step
        assert step >= reached
        reached = step
        command = [sys.executable, "-m", "trident", "train", "--resume", str(tmp_path / "run")]
    # Each process saved at least one step, but for the first, whose first checkpoint is from before any.
    assert reached >= 2
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) >= 2


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
