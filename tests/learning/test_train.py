"""Training: reproducible, resumable, logged; the best weights are chosen on validation tasks."""

import ctypes
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from short_runs import QUICK, Interrupting, Whole, assert_same_weights, log_of, resume, run, with_training
from tiny import TINY_METHOD, TINY_RECIPE, Silent, source_for, tiny_store
from trident.engines.plain.inner_loop import InnerLoopLearner
from trident.errors import TridentError
from trident.learning.checkpoint import BEST, LAST, load_checkpoint
from trident.learning.run_start import check_same_data, start_run
from trident.learning.training import train
from trident.measuring.evaluate import evaluate, validate
from trident.measuring.subject import subject_of
from trident.recipes.recipe import Recipe


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole") / "run"
    return Whole(folder, run(folder))


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    one, other = (run(tmp_path / str(seed), with_training(QUICK, steps=2, seed=seed)) for seed in (0, 1))
    assert not torch.equal(one.parameters["label.loc.weight"], other.parameters["label.loc.weight"])


def test_best_weights_are_chosen_on_tasks_of_their_own(tmp_path: Path) -> None:
    """Else every later figure on validation classes, with the same seed, would flatter the chosen weights."""
    recipe, store = with_training(QUICK, validation_tasks=40), tiny_store()
    run(tmp_path / "run", recipe, store)
    best = load_checkpoint(tmp_path / "run" / BEST)
    assert best.best is not None
    found = {}
    for stream in ("selection", "val"):
        result = evaluate(subject_of(best), store, stream=stream, split="val", tasks=40, seed=0)
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


def test_the_same_seed_gives_the_same_weights_in_twenty_steps_or_ten_and_ten(tmp_path: Path, whole: Whole) -> None:
    assert whole.end.step == 20
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


def test_other_data_are_refused_on_resume(whole: Whole) -> None:
    with pytest.raises(TridentError, match="trained on other data"):
        check_same_data(load_checkpoint(whole.folder / LAST), tiny_store(images_per_class=9), whole.folder)
