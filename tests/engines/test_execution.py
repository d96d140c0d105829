"""Which engine and precision a run gets, and what is refused."""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ablation_grids import Answer
from commands import assert_one_line_error
from tiny import TheirMethod
from trident.backbones.conv4 import Conv4Backbone
from trident.engines.execution import Execution, execution_for, make_learner
from trident.engines.fused import why_not_fused
from trident.engines.learners import learners_of
from trident.engines.plain.heads import HeadLearner
from trident.engines.plain.inner_loop import InnerLoopLearner
from trident.errors import TridentError
from trident.methods.base import TrainingStep
from trident.methods.inner_loop.maml import Maml
from trident.methods.metric.protonet import ProtoNet
from trident.recipes.files import recipe_names
from trident.recipes.loading import load_recipe


def test_without_a_gpu_the_fused_engine_says_so(tmp_path: Path, trident_here: Callable[..., Answer]) -> None:
    answer = trident_here("train", "glyphs", "--out", tmp_path / "run", "--device", "cpu", "--engine", "fused")
    assert_one_line_error(answer, "the fused engine cannot be used here: it needs an NVIDIA GPU")
    assert not (tmp_path / "run").exists()


def test_auto_is_plain_on_a_cpu() -> None:
    recipe = load_recipe("mini-5w1s")
    assert execution_for("cpu", "auto", "auto", recipe) == Execution("cpu", "plain", "fp32")
    assert type(make_learner(recipe, Execution())) is InnerLoopLearner
    assert type(make_learner(load_recipe("mini-5w1s-protonet"), Execution())) is HeadLearner


@pytest.mark.parametrize(("engine", "precision"), [("auto", "fp16"), ("plain", "bf16"), ("auto", "tf32")])
def test_a_cpu_computes_in_full(engine: str, precision: str) -> None:
    with pytest.raises(TridentError, match=precision):
        execution_for("cpu", engine, precision, load_recipe("mini-5w1s"))


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is there to be asked about only."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("settings", "precision", "engine"),
    [
        ([], "auto", "fused"),
        ([], "tf32", "fused"),
        (["backbone.channels=64"], "auto", "fused"),
        (["backbone.channels=64"], "fp32", "plain"),
        (["backbone.channels=24"], "auto", "plain"),
        (["method.semantic_channels=16"], "auto", "fused"),
        (["method.semantic_channels=24"], "auto", "plain"),
        (["method.semantic_batch_norm=task"], "auto", "fused"),
        (["backbone.image_size=63"], "auto", "plain"),
        (["protocol.batch_norm=support"], "auto", "plain"),
    ],
)
def test_auto_takes_the_fused_engine_where_it_can(settings: list[str], precision: str, engine: str) -> None:
    recipe = load_recipe("mini-5w1s", settings)
    assert execution_for("cuda", "auto", precision, recipe).engine == engine
    if engine == "plain":
        with pytest.raises(TridentError, match="the fused engine cannot be used here"):
            execution_for("cuda", "fused", precision, recipe)


@pytest.mark.usefixtures("a_gpu")
def test_what_the_fused_engine_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("mini-5w1s")
    assert why_not_fused("cuda", recipe, "auto") is None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "C compiler" in str(why_not_fused("cuda", recipe, "auto"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Triton" in str(why_not_fused("cuda", recipe, "auto"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "8.0" in str(why_not_fused("cuda", recipe, "auto"))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "NVIDIA" in str(why_not_fused("cuda", recipe, "auto"))


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_with_conv4_is_trained_by_the_fused_engine(name: str) -> None:
    """But for methods that have no code for it, such as MAML."""
    recipe = load_recipe(name)
    why = why_not_fused("cuda", recipe.in_training(), "auto")
    if "fused" not in learners_of(type(recipe.method)):
        assert why == f"{recipe.method.about.title} has no code for it"
    elif isinstance(recipe.backbone, Conv4Backbone):
        assert why is None
    else:
        assert why == "it computes conv4, and the recipe has another backbone"


@dataclass(frozen=True)
class TheirTraining(ProtoNet):
    def training_step(self, *args: Any) -> TrainingStep:
        return super().training_step(*args)


@pytest.mark.usefixtures("a_gpu")
def test_a_method_with_a_training_step_of_its_own_has_no_code_for_the_fused_engine() -> None:
    recipe = replace(load_recipe("mini-5w1s-protonet"), method=TheirTraining())
    assert execution_for("cuda", "auto", "auto", recipe).engine == "plain"
    with pytest.raises(TridentError, match="Prototypical Networks has no code for it"):
        execution_for("cuda", "fused", "auto", recipe)


@dataclass(frozen=True)
class TheirInnerLoop(Maml):
    pass


def test_methods_of_other_packages_have_the_learners_of_their_base_class() -> None:
    assert learners_of(TheirMethod) == learners_of(ProtoNet) and learners_of(TheirMethod).keys() == {"plain", "fused"}
    assert learners_of(TheirInnerLoop) == learners_of(Maml) and learners_of(Maml).keys() == {"plain"}
