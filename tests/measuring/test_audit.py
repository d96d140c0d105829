"""The audit tells a model that reads the order of the queries from one that does not."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stores import write_store
from tiny import TINY_METHOD, TINY_RECIPE, Silent, tiny_store
from trident.backbones.frozen import FrozenBackbone
from trident.data.glyphs import open_glyphs
from trident.data.store import ImageStore, class_table, store_in_memory
from trident.engines.execution import Execution
from trident.engines.learner import Learner
from trident.errors import NotFiniteError, TridentError
from trident.learning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from trident.learning.run_start import start_run
from trident.learning.training import train
from trident.measuring.audit import DEFAULT, PROTOCOLS, SORTED, Audit, AuditRow, audit
from trident.measuring.evaluate import Evaluation, evaluate, validate
from trident.measuring.prediction import predict, predict_one_by_one
from trident.measuring.subject import Function, PredictFunction, TrainedModel
from trident.methods.base import Method
from trident.methods.metric.protonet import ProtoNet
from trident.recipes.loading import load_recipe
from trident.settings import EpisodeSpec, Protocol
from trident.tasks.episodes import EpisodeSampler, task_generator
from trident.tasks.source import TaskSource
from trident.tasks.task import Task, queries_alone

# For models that are meant for transductive batch norm, which is then the default and not a row of its own.
DISTINCT = {name: protocol for name, protocol in PROTOCOLS.items() if name != "transductive batch norm"}


def blurred_store() -> ImageStore:
    """Classes that are hard to tell by one image, but easy once the images of a class are averaged."""
    generator = np.random.default_rng(7)
    n_classes, n_images, size = 120, 30, 16
    patterns = generator.normal(0, 1, (n_classes, 1, 4, 4, 1)).repeat(4, 2).repeat(4, 3)
    images = 128 + 28 * patterns + 60 * generator.normal(0, 1, (n_classes, n_images, size, size, 1))
    names = [(f"class {i}", "train" if i < 80 else "val" if i < 100 else "test", n_images) for i in range(n_classes)]
    pixels = np.clip(images, 0, 255).astype(np.uint8).reshape(-1, size, size, 1)
    return store_in_memory("blurred", pixels, class_table(names))


def nearest_mean(support: np.ndarray, labels: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """One where the mean support image is nearest, else 0."""
    means = np.stack([support[labels == label].mean(0) for label in range(labels.max() + 1)])
    distances = np.square(queries[:, None].astype(float) - means).sum((2, 3, 4))
    return np.asarray(np.eye(len(means))[distances.argmin(1)])


def by_place(support: np.ndarray, labels: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Takes the first queries for the first class and so on; by the images it is right now and then."""
    n_way = labels.max() + 1
    places = np.eye(n_way)[np.arange(len(queries)) * n_way // len(queries)]
    return np.asarray(0.6 * places + 0.4 * nearest_mean(support, labels, queries))


def test_a_function_that_reads_the_places_of_queries_is_found_out() -> None:
    chosen = {name: PROTOCOLS[name] for name in ("default", SORTED)}
    episode = EpisodeSpec(n_way=2, n_shot=5, n_query=8)

    def audited(function: Function) -> Audit:
        subject = PredictFunction(function, episode)
        return audit(subject, blurred_store(), split="test", tasks=40, seed=0, protocols=chosen)

    cheat, honest = audited(by_place), audited(nearest_mean)
    assert cheat.depends_on_query_order and not honest.depends_on_query_order
    assert "ACCURACY DEPENDS ON QUERY ORDER: 100.00 % when queries are sorted by class" in cheat.verdict()
    assert f"{cheat.rows[0].evaluation.accuracy:.2f} % when the same queries are shuffled" in cheat.verdict()
    assert "No dependence on query order found" in honest.verdict()
    assert honest.rows[0].evaluation.accuracy > 60


@pytest.mark.soak
@pytest.mark.parametrize("order", ["class_sorted", "shuffled"])
def test_the_audit_finds_a_dependence_on_query_order_where_there_is_one(order: str, tmp_path: Path) -> None:
    small = ["image_size=16", "channels=8", "label_latents=8", "semantic_latents=4", "classifier_width=16"]
    few = ["n_way=2", "n_query=8", "training.steps=150", "validate_every=1000", "validation_tasks=2"]
    paper = ["classifier_start=learned", f"query_order={order}"]
    recipe, store = load_recipe("glyphs", [*small, *few, *paper]), blurred_store()
    start = start_run(recipe, store, "none", tmp_path / "run", "cpu")
    trained = train(start, store, tmp_path / "run", "cpu", Silent(), validate)
    trained = replace(trained, parameters={key: value.detach() for key, value in trained.parameters.items()})
    chosen = {name: PROTOCOLS[name] for name in ("default", SORTED)}
    result = audit(trained, store, split="test", tasks=200, seed=0, protocols=chosen)
    assert result.rows[0].evaluation.accuracy > 85  # it did learn: chance is 50 %
    if order == "class_sorted":
        assert result.depends_on_query_order
        row = result.row(SORTED)
        assert row is not None and row.difference > 0  # 1 to 3 points: a processor's rounding decides
        assert "ACCURACY DEPENDS ON QUERY ORDER" in result.verdict()
        assert f"{result.rows[0].evaluation.accuracy:.2f} % when the same queries are shuffled" in result.verdict()
    else:
        assert not result.depends_on_query_order
        assert "No dependence on query order found" in result.verdict()


def untrained(method: Method = TINY_METHOD, **protocol: object) -> Checkpoint:
    recipe = replace(TINY_RECIPE, method=method, protocol=replace(Protocol(), **protocol))  # type: ignore[arg-type]
    return Checkpoint(recipe, recipe.initial(0), recipe.model.initial_running(), 0)


def learner_and_source(checkpoint: Checkpoint) -> tuple[Learner, TaskSource]:
    """What measures these weights, and the test tasks they are measured on."""
    model = TrainedModel(checkpoint.recipe, checkpoint.parameters, checkpoint.running)
    prepared = model.prepare(tiny_store(), {"split": "test", "tasks": 1, "seed": 0})
    return model.learner(Execution()), prepared.source


def test_every_protocol_is_measured_once_and_paired() -> None:
    seen: list[tuple[str, int, int]] = []
    result = audit(
        untrained(query_order="class_sorted"),
        tiny_store(),
        split="test",
        tasks=6,
        seed=0,
        progress=lambda name, done, total: seen.append((name, done, total)),
    )
    assert [row.name for row in result.rows] == list(DISTINCT)
    assert [row.evaluation.subject.protocol for row in result.rows] == list(DISTINCT.values())
    assert result.rows[0].evaluation.subject.protocol == DEFAULT  # the default, not what the run was trained under
    assert result.rows[0].difference == 0
    for row in result.rows[1:]:
        change = row.evaluation.predictions.accuracies - result.rows[0].evaluation.predictions.accuracies
        assert row.difference == pytest.approx(change.mean())
        assert row.difference_ci95 == pytest.approx(1.96 * change.std(ddof=1) / np.sqrt(6))
    assert seen[-1] == ("as the paper", 54, 54)
    assert result.to_json()["rows"][1]["protocol"]["query_order"] == "class_sorted"


def test_a_protocol_that_makes_the_model_blow_up_costs_one_row(tmp_path: Path, trident_here: Callable) -> None:
    model, store = untrained(), tiny_store()
    model = replace(model, running={key: torch.full_like(value, torch.inf) for key, value in model.running.items()})
    result = audit(model, store, split="test", tasks=2, seed=0)
    assert [row.name for row in result.rows] == [name for name in DISTINCT if name != "running batch norm"]
    assert "test task 0: the prediction is not finite" in result.without_result["running batch norm"]
    assert result.to_json()["without_result"] == result.without_result

    save_checkpoint(tmp_path / "model.safetensors", model)
    write_store(tmp_path / "noise.store", store.dataset, store.classes, store.images)
    shown = trident_here(
        "evaluate",
        tmp_path / "model.safetensors",
        "--also",
        "audit",
        "--data",
        tmp_path / "noise.store",
        "--tasks",
        "2",
    )
    assert re.search(r"^running batch norm: no result: val task 0: ", shown.stdout, re.M), shown.stderr
    assert "Whether accuracy depends on query order is open" in shown.stdout


@pytest.mark.parametrize("name", ["default", SORTED])
def test_the_verdict_needs_the_default_and_sorted_queries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def blows_up(checkpoint: Checkpoint, store: ImageStore, protocol: Protocol, *_: object, **__: object) -> Evaluation:
        if protocol == PROTOCOLS[name]:
            raise NotFiniteError("it blew up")
        return evaluate(checkpoint, store, protocol, split="test", tasks=2, seed=0)

    monkeypatch.setattr("trident.measuring.audit.evaluate", blows_up)
    with pytest.raises(NotFiniteError, match="it blew up"):
        audit(untrained(), tiny_store(), split="test", tasks=2, seed=0)


def test_without_sorted_queries_the_verdict_says_that_it_was_not_measured() -> None:
    chosen = {name: PROTOCOLS[name] for name in ("default", "one latent sample")}
    result = audit(untrained(), tiny_store(), split="test", tasks=2, seed=0, protocols=chosen)
    assert "was not measured" in result.verdict()
    assert (result.depends_on_query_order, result.no_dependence_found) == (False, False)
    assert "was not measured" in result.to_json()["verdict"]


def test_a_method_without_latents_has_no_rows_about_them() -> None:
    result = audit(untrained(ProtoNet()), tiny_store(), split="test", tasks=2, seed=0)
    about_latents = {"one latent sample", "average of 10 samples", "as the paper"}
    assert [row.name for row in result.rows] == [name for name in DISTINCT if name not in about_latents]
    assert result.without_result == {}
    assert "latent" not in " ".join(row.evaluation.describe_protocol() for row in result.rows)


def test_a_method_that_needs_all_queries_at_once_has_no_row_for_one_at_a_time() -> None:
    result = audit(load_checkpoint("glyphs-ssr"), open_glyphs(), split="test", tasks=2, seed=0)
    assert list(result.without_result) == ["one query at a time"]
    assert "classify as many queries at once as in training" in result.without_result["one query at a time"]
    assert "class-sorted queries" in [row.name for row in result.rows]


def with_difference(difference: float, ci95: float, tasks: int = 100) -> Audit:
    evaluation = audit(untrained(), tiny_store(), split="test", tasks=2, seed=0, protocols={"default": DEFAULT}).rows[0]
    measured = replace(evaluation.evaluation, tasks=tasks)
    return Audit((evaluation, AuditRow(SORTED, measured, difference, ci95)))


def test_what_the_verdict_says() -> None:
    assert "No dependence" in with_difference(0.5, 0.6).verdict()
    assert "is open" in with_difference(0.7, 0.6).verdict()
    assert "tells this model" in with_difference(1.0, 0.6).verdict()
    assert "misleads" in with_difference(-1.0, 0.6).verdict()
    assert "is open" in with_difference(0.0, 3.0).verdict()  # an interval too wide to say anything
    assert "is open" in with_difference(9.0, 1.0, tasks=5).verdict()  # too few tasks for anything
    assert "is open" in with_difference(0.0, 0.0, tasks=5).verdict()


def test_protocols_share_classes_and_support_images() -> None:
    spec = EpisodeSpec(n_way=3, n_shot=2, n_query=3)
    store = tiny_store(images_per_class=12)

    def draw(protocol: Protocol, index: int) -> tuple[list[int], list[int], float]:
        generator = task_generator(0, "test", index)
        episode = EpisodeSampler(store, "test", spec, protocol).draw(generator)
        return episode.support.tolist(), sorted(episode.query.tolist()), float(generator.random())

    for index in range(20):
        plain = draw(Protocol(), index)
        assert draw(Protocol(query_order="class_sorted"), index) == plain
        uneven = draw(Protocol(balance="dirichlet"), index)
        assert uneven[0] == plain[0]
        assert uneven[2] == plain[2]  # and so does all noise drawn afterwards
    assert any(draw(Protocol(balance="dirichlet"), i)[1] != draw(Protocol(), i)[1] for i in range(20))


@pytest.fixture(params=["positional", "off"])
def setup(request: pytest.FixtureRequest) -> Iterator[tuple[Checkpoint, str]]:
    yield untrained(replace(TINY_METHOD, attfex=request.param)), request.param


def test_a_query_alone_does_not_feel_the_others(setup: tuple[Checkpoint, str]) -> None:
    checkpoint, attfex = setup
    learner, source = learner_and_source(checkpoint)
    parameters, task = checkpoint.parameters, source.batch(range(2)).task
    one_by_one = predict_one_by_one(learner, parameters, task, at_once=4)
    assert one_by_one.shape == (2, 6, 3)
    # Other pictures in the places of all queries but one change nothing for that one; together they do.
    keep = 3
    pixels = task.pixels.clone()
    others = [task.n_support + i for i in range(6) if i != keep]
    pixels[:, others] = torch.rand_like(pixels[:, others])
    changed = task.with_images(pixels)
    after = predict_one_by_one(learner, parameters, changed, at_once=4)
    assert torch.equal(after[:, keep], one_by_one[:, keep])
    assert not torch.allclose(
        predict(learner, parameters, changed)[:, keep], predict(learner, parameters, task)[:, keep]
    )
    # And it is the same as a task with that query only, where the network can take such a task.
    if attfex == "off":
        single = queries_alone(task, 1, [keep])
        assert single.images.shape[1] == task.n_support + 1
        assert torch.allclose(predict(learner, parameters, single)[0, 0], one_by_one[1, keep], atol=1e-5)


def test_one_query_at_a_time_is_for_evaluation_only(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="for evaluation only"):
        start_run(untrained(queries_at_once="one").recipe, tiny_store(), "none", tmp_path / "run", "cpu")


def test_single_images_have_no_support_set_for_batch_norm(tmp_path: Path) -> None:
    recipe = load_recipe("glyphs-simpleshot", ["protocol.batch_norm=support"])
    with pytest.raises(TridentError, match="single images have no support set; train with 'running'"):
        start_run(recipe, open_glyphs(), "glyphs", tmp_path / "run", "cpu")


def only_draw(task: Task, draw: int) -> Task:
    """The task with one draw of its queries' noise."""
    kept = {name: values for name, values in task.noise.items() if not name.startswith("query/")}
    own = {f"query/0/{latent}": task.noise[f"query/{draw}/{latent}"] for latent in ("semantic", "label")}
    return replace(task, noise=kept | own)


def test_averaged_latents_average_probabilities() -> None:
    checkpoint = untrained(latents="average", latent_samples=4)
    learner, source = learner_and_source(checkpoint)
    parameters, task = checkpoint.parameters, source.batch([0, 1]).task
    singly = [predict(learner, parameters, only_draw(task, draw)).exp() for draw in range(4)]
    assert not torch.allclose(singly[0], singly[1])
    assert torch.allclose(predict(learner, parameters, task).exp(), torch.stack(singly).mean(0), atol=1e-6)


def test_the_default_has_the_batch_norm_that_the_model_is_meant_for() -> None:
    recipe = replace(TINY_RECIPE, protocol=Protocol(batch_norm="running"), method=ProtoNet())
    model = Checkpoint(recipe, recipe.initial(0), recipe.model.initial_running(), 0)
    result = audit(model, tiny_store(), split="test", tasks=4, seed=0)
    rows = {row.name: row.evaluation.subject.protocol.batch_norm for row in result.rows}
    assert rows.pop("transductive batch norm") == "transductive"
    assert rows.pop("support batch norm") == "support"
    assert set(rows.values()) == {"running"} and "running batch norm" not in rows


def test_an_audit_with_unlabelled_images_leaves_single_queries_out() -> None:
    recipe = replace(TINY_RECIPE, method=replace(TINY_METHOD, attfex="off"), episode=EpisodeSpec(3, 1, 2, 2, 1))
    checkpoint = Checkpoint(recipe, recipe.initial(0), recipe.model.initial_running(), 0)
    found = audit(checkpoint, tiny_store(), split="train", tasks=2, seed=0)
    names = [row.name for row in found.rows]
    assert "one query at a time" not in names and "default" in names
    assert "2 unlabelled images of each class and of 1 other classes" in found.rows[0].evaluation.describe_protocol()


def test_features_have_no_batch_norm_to_audit() -> None:
    recipe, backbone = load_recipe("features-nearest-mean"), FrozenBackbone(size=3)
    images = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    store = ImageStore("made-up", images, class_table((str(i), "test", 10) for i in range(6)), "", backbone.of)
    model = Checkpoint(replace(recipe, backbone=backbone, episode=EpisodeSpec(2, 1, 3)), {}, {}, 0)
    found = audit(model, store, split="test", tasks=4, seed=0)
    assert [row.name for row in found.rows if "batch norm" in row.name] == []
