"""`from trident import few_shot`: methods on features of one's own, and comparisons of them."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from trident import few_shot
from trident.errors import TridentError

ROOT = Path(__file__).parents[2]
NUMBERS = np.random.default_rng(0)
BY_CLASS = {name: NUMBERS.normal(size=16) + 0.7 * NUMBERS.normal(size=(30, 16)) for name in "abcdefg"}
LABELLED = [("c", 0), ("a", 0), ("b", 0), ("a", 1)]  # unequal classes, in no order
FEATURES, NAMES = np.stack([BY_CLASS[name][i] for name, i in LABELLED]), [name for name, _ in LABELLED]
QUERIES = np.concatenate([BY_CLASS[name][10:18] for name in "abc"])


@pytest.mark.parametrize("name", few_shot.methods())
def test_every_method_without_weights_beats_chance(name: str) -> None:
    quick: dict[str, Any] = {"steps": 50} if name in ("tim", "alpha-tim") else {}
    head = few_shot(name, **quick).fit(FEATURES, NAMES)
    probabilities = head.predict_proba(QUERIES)
    assert probabilities.shape == (24, 3)
    assert np.allclose(probabilities.sum(1), 1, atol=1e-5)
    if name != "paddle":  # it is made for many more queries
        assert (head.predict(QUERIES) == np.repeat(["a", "b", "c"], 8)).mean() > 0.5


def test_labels_and_results_are_of_the_users_kind() -> None:
    head = few_shot("soft-kmeans").fit(FEATURES.tolist(), [30, 10, 20, 10])
    assert head.classes_.tolist() == [10, 20, 30]
    texts, numbers = few_shot("soft-kmeans").fit(FEATURES, NAMES), head.predict(QUERIES)
    assert numbers.tolist() == [{"a": 10, "b": 20, "c": 30}[name] for name in texts.predict(QUERIES)]
    tensors = few_shot("soft-kmeans").fit(torch.tensor(FEATURES), torch.tensor([30, 10, 20, 10]))
    assert tensors.predict(torch.tensor(QUERIES)).tolist() == numbers.tolist()
    probabilities = tensors.predict_proba(torch.tensor(QUERIES))
    assert isinstance(probabilities, torch.Tensor)
    assert np.array_equal(probabilities.numpy(), head.predict_proba(QUERIES))
    assert head.predict_proba(QUERIES[:0]).shape == (0, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_results_stay_on_the_gpu() -> None:
    head = few_shot("soft-kmeans").fit(torch.tensor(FEATURES).cuda(), NAMES)
    assert head.predict_proba(torch.tensor(QUERIES).cuda()).is_cuda


def test_transductive_methods_look_at_all_queries() -> None:
    for name, together in (("nearest-mean", False), ("soft-kmeans", True)):
        head = few_shot(name).fit(FEATURES, NAMES)
        same = np.allclose(head.predict_proba(QUERIES)[:3], head.predict_proba(QUERIES[:3]), atol=1e-6)
        assert same != together


def test_trained_weights_take_features_of_their_network() -> None:
    head = few_shot("protonet", weights="mini-5w1s-protonet")
    rows = NUMBERS.normal(size=(9, 1600)).astype(np.float32)
    assert head.fit(rows[:3], [0, 1, 2]).predict_proba(rows[3:]).shape == (6, 3)
    with pytest.raises(TridentError, match=r"take features of shape \(25, 64\) or \(1600,\), not \(16,\)"):
        head.fit(FEATURES, NAMES).predict(QUERIES)


def of_feature_maps(name: str) -> Any:
    return few_shot(name).fit(FEATURES.reshape(4, 4, 4), NAMES).predict_proba(QUERIES.reshape(24, 4, 4))


def test_feature_maps() -> None:
    flat = few_shot("nearest-mean").fit(FEATURES, NAMES).predict_proba(QUERIES)
    assert np.allclose(of_feature_maps("nearest-mean"), flat)
    assert of_feature_maps("frn").shape == (24, 3)


def nearest(support: np.ndarray, labels: np.ndarray, queries: np.ndarray) -> Any:
    return few_shot("nearest-mean").fit(support, labels).predict_proba(queries)


def nearest_labels(support: np.ndarray, labels: np.ndarray, queries: np.ndarray) -> Any:
    return nearest(support, labels, queries).argmax(1)


@pytest.mark.parametrize("balance", ["balanced", "dirichlet"])
def test_all_get_the_same_tasks(balance: str) -> None:
    methods = ["nearest-mean", nearest, nearest_labels, few_shot("soft-kmeans"), nearest]
    found = few_shot.compare(methods, BY_CLASS, tasks=20, queries=5, balance=balance, seed=3)
    first = found.accuracies["nearest-mean"]
    assert list(found.accuracies) == ["nearest-mean", "nearest", "nearest_labels", "soft-kmeans", "nearest 2"]
    for name in ("nearest", "nearest_labels", "nearest 2"):
        assert np.array_equal(found.accuracies[name], first)
    rows = {row["name"]: row for row in found.rows()}
    differences = found.accuracies["soft-kmeans"] - first
    assert rows["soft-kmeans"]["difference"] == pytest.approx(differences.mean())
    assert rows["soft-kmeans"]["difference_ci95"] == pytest.approx(1.96 * differences.std(ddof=1) / 20**0.5)
    assert "difference" not in rows["nearest-mean"]
    assert f"{first.mean():.2f} ± {rows['nearest-mean']['ci95']:.2f}" in repr(found)
    assert "5-way 1-shot tasks from 7 classes, 5 queries per class, shuffled queries" in found.protocol


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: few_shot("timm"), "no method is called 'timm': did you mean 'tim'?"),
        (lambda: few_shot("tim", stesp=3), "unknown setting 'method.stesp': did you mean 'steps'?"),
        (lambda: few_shot("maml"), "features are not enough"),
        (lambda: few_shot("feat"), "feat has to be trained: give weights"),
        (lambda: few_shot("feat", "mini-5w1s-protonet"), "has weights of protonet, not of feat"),
        (lambda: few_shot("tim").predict(QUERIES), "call fit first"),
        (lambda: few_shot("tim").fit(FEATURES, NAMES[1:]), "4 images came with 3 labels"),
        (lambda: few_shot("tim").fit(FEATURES[0], NAMES), "(image, feature)"),
        (lambda: few_shot("tim").fit(FEATURES * np.nan, NAMES), "NaN"),
        (
            lambda: few_shot("tim").fit(FEATURES, NAMES).predict(QUERIES[:, :3]),
            "of shape (3,), the labelled images (16,)",
        ),
        (lambda: few_shot.compare(["tim"], BY_CLASS, n_way=9), "9-way tasks need 9 classes or more, and 7 were given"),
        (lambda: few_shot.compare(["tim"], BY_CLASS, balance="no"), "balance is 'no': it must be one of balanced"),
        (lambda: few_shot.compare([], BY_CLASS), "at least one method"),
        (lambda: few_shot.compare([3], BY_CLASS), "3 is neither a method's name"),
        (lambda: few_shot.compare(["tim"], BY_CLASS, tasks=cast(Any, 5.5)), "tasks is 5.5: it must be a whole number"),
        (lambda: few_shot.compare([lambda *_: ["a"]], BY_CLASS), "labels from 0 to 4"),
        (lambda: few_shot.compare(["tim"], cast(Any, [FEATURES])), "must be a dict"),
        (lambda: few_shot("tim", name="protonet"), "'name' is not a setting"),
        (lambda: few_shot("tim", rectify=True), "unknown setting 'method.rectify'"),
        (lambda: few_shot("tim").fit(FEATURES, [0] * 4), "at least two classes"),
        (lambda: few_shot("tim").fit(FEATURES, ["a", "b", 1, 1]), "cannot be sorted"),
        (lambda: few_shot("tim").fit(FEATURES, [0, 1, None, 1]), "cannot be sorted"),
        (lambda: few_shot("tim").fit(FEATURES, [0, 1, np.nan, 1]), "at least two classes"),
        (lambda: few_shot("tim").fit([[1], [1, 2], [1], [1]], NAMES), "equally many"),
        (lambda: few_shot("tim").fit(torch.full((4, 2), 1e300, dtype=torch.float64), NAMES), "infinite"),
    ],
)
def test_mistakes(mistake: Any, message: str) -> None:
    with pytest.raises(TridentError) as caught:
        mistake()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_importing_trident_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, trident; assert not {'torch', 'numpy', 'ctypes', 'trident.allocator'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Jupyter runs it, with fewer tasks: the value of a cell's last line is shown."""
    pytest.importorskip("matplotlib").use("Agg")
    cells = json.loads((ROOT / "docs" / "few_shot.ipynb").read_text("utf-8"))["cells"]
    shown, space = [], {"__name__": "notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            body = ast.parse("".join(cell["source"]).replace("tasks=100", "tasks=10")).body
            last = body.pop() if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), "few_shot.ipynb", "exec"), space)
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), "few_shot.ipynb", "eval"), space))
    assert "laplacian-shot" in shown[0]
    assert shown[1] > 0.6
    assert "medians" in repr(shown[2])
    assert "Dirichlet" in repr(shown[-1])
