"""What training does with losses that are not finite, with named losses, and with batches of all classes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from short_runs import QUICK, Interrupting, assert_same_weights, log_of, resume, run, with_training
from tiny import TINY_METHOD, TINY_RECIPE, source_for, tiny_store
from trident.cli.console import TrainingProgress
from trident.engines.execution import Execution, make_learner
from trident.engines.plain.heads import HeadLearner
from trident.errors import TridentError
from trident.learning import run_state, training
from trident.learning.checkpoint import BEST, LAST, Checkpoint, load_checkpoint
from trident.learning.run_state import make_optimizer, update
from trident.learning.step_gradient import training_source
from trident.methods.base import Losses, cross_entropy
from trident.methods.metric.protonet import ProtoNet
from trident.methods.metric.simpleshot import SimpleShot
from trident.methods.registry import METHODS
from trident.nn.parameters import Parameters
from trident.settings import Protocol, TrainingSettings
from trident.tasks.source import TaskSource
from trident.tasks.task import Batch, Labels


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


@pytest.mark.parametrize(("precision", "helps"), [("fp32", False), ("fp16", True)])
def test_a_run_in_fp16_that_blows_up_is_told_of_bf16(
    tmp_path: Path, precision: str, helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp16 itself needs a GPU, so the run only says that it was computed in it."""

    def in_precision(start: Checkpoint, *others: Any) -> run_state.RunState:
        return run_state.RunState(replace(start, provenance=start.provenance | {"precision": precision}), *others)

    monkeypatch.setattr(training, "RunState", in_precision)
    with pytest.raises(TridentError, match=r"a lower training\.rate") as caught:
        run(tmp_path / "run", with_training(rate=1e9))
    assert ("resume this run with --precision bf16" in str(caught.value)) == helps


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

    monkeypatch.setattr(run_state, "update", watched)
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


def test_training_can_do_without_noise() -> None:
    store = tiny_store()
    for noise in (True, False):
        batch = training_source(with_training(noise=noise), store, "cpu").batch([0])
        assert batch.task.noise and all(bool(values.any()) == noise for values in batch.task.noise.values())


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
    features = learner.features(recipe.initial(0), batch.task)
    torch.testing.assert_close(end.running["mean_feature"], features[0].mean(0))
    kept = load_checkpoint(tmp_path / "run" / BEST).running["mean_feature"]
    assert torch.equal(kept, end.running["mean_feature"])


def test_simpleshot_wants_to_know_all_training_classes(tmp_path: Path) -> None:
    with pytest.raises(TridentError, match="training_classes is 4, but noise has 5 training classes"):
        run(tmp_path / "run", replace(SIMPLESHOT, method=SimpleShot(training_classes=4)))
    assert not (tmp_path / "run").exists()
