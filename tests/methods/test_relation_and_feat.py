"""Relation Networks and FEAT against their equations, written as loops."""

import math

import numpy as np
import pytest
import torch

from classic_tasks import LABELS, N_WAY, Array, N, random_parameters, some_task
from trident.methods.metric.feat import Feat
from trident.methods.metric.relation_network import RelationNetwork
from trident.tasks.task import Labels


def normalised(x: Array, gain: Array, shift: Array) -> Array:
    """One pair's maps (channel, h, w)."""
    return np.asarray(gain[:, None, None] * (x - x.mean()) / np.sqrt(x.var() + 1e-5) + shift[:, None, None])


def convolved(x: Array, weight: Array, bias: Array) -> Array:
    """3x3, the edges filled with zeros."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    found = np.zeros((len(weight), *x.shape[1:]))
    for place in np.ndindex(*found.shape):
        c, i, j = place
        found[place] = np.sum(weight[c] * padded[:, i : i + 3, j : j + 3]) + bias[c]
    return found


def pooled(x: Array) -> Array:
    half = x.shape[1] // 2
    if not half:
        return x
    return np.array(
        [[[m[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].max() for j in range(half)] for i in range(half)] for m in x]
    )


@pytest.mark.parametrize("side", [1, 2, 5])
def test_relation_network_is_what_it_says(side: int) -> None:
    features, task = some_task(side**2, 3)
    method = RelationNetwork(width=4, hidden=3)
    parameters = random_parameters(method, 3)
    own = {key.removeprefix("relation."): value.numpy() for key, value in parameters.items()}
    found = method.head(parameters, features, task)
    maps = features.numpy().reshape(2, -1, side, side, 3).transpose(0, 1, 4, 2, 3)
    for query, c in [(0, 0), (1, 2), (4, 1)]:
        class_map = np.mean([maps[1, i] for i in range(N) if LABELS[1, i] == c], 0)
        x = np.concatenate([class_map, maps[1, N + query]])
        for block in "01":
            x = convolved(x, own[f"{block}.weight"], own[f"{block}.bias"])
            x = pooled(np.maximum(normalised(x, own[f"{block}.gain"], own[f"{block}.shift"]), 0))
        hidden = np.maximum(own["hidden.weight"] @ x.mean((1, 2)) + own["hidden.bias"], 0)
        assert float(found[1, query, c]) == pytest.approx(float((own["score.weight"] @ hidden + own["score.bias"])[0]))


def test_relation_network_s_losses() -> None:
    logits = torch.tensor([[[1.0, -2.0], [0.5, 3.0]]])
    labels = Labels(torch.tensor([[0, 1]]))

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    squares = [(sigmoid(1) - 1) ** 2, sigmoid(-2) ** 2, sigmoid(0.5) ** 2, (sigmoid(3) - 1) ** 2]
    assert float(RelationNetwork().losses(logits, labels)["total"]) == pytest.approx(sum(squares) / 4)
    entropy = [math.log(1 + math.exp(-3)), math.log(1 + math.exp(-2.5))]
    assert float(RelationNetwork(loss="cross_entropy").losses(logits, labels)["total"]) == pytest.approx(
        sum(entropy) / 2
    )


# FEAT


def block(own: dict[str, Array], asking: list[Array], answering: list[Array]) -> list[Array]:
    results = []
    for a in asking:
        query = own["asks.weight"] @ a
        scores = np.array([query @ (own["answers.weight"] @ b) / math.sqrt(len(a)) for b in answering])
        weights = np.exp(scores) / np.exp(scores).sum()
        heard = sum(w * (own["values.weight"] @ b) for w, b in zip(weights, answering, strict=True))
        x = a + own["out.weight"] @ heard + own["out.bias"]
        results.append(own["gain"] * (x - x.mean()) / np.sqrt(x.var() + 1e-5) + own["shift"])
    return results


def soft(scores: list[float]) -> Array:
    return np.asarray(np.exp(scores) / np.exp(scores).sum())


def feat_by_loops(method: Feat, own: dict[str, Array], f: Array, labels: Array) -> tuple[Array, list[Array]]:
    """Logits (query, class), and the features that the second loss sees."""
    support, queries = list(f[:N]), list(f[N:])
    if method.transductive:
        support = block(own, support, support + queries)
    groups = [[row for row, label in zip(support, labels, strict=True) if label == c] for c in range(N_WAY)]
    means = [np.mean(group, 0) for group in groups]
    if method.transductive:
        belongs = [soft([-np.sum((q - m) ** 2) / method.temperature for m in means]) for q in queries]
        prototypes = [
            (sum(group) + sum(p[c] * q for p, q in zip(belongs, queries, strict=True)))
            / (len(group) + sum(p[c] for p in belongs))
            for c, group in enumerate(groups)
        ]
    else:
        prototypes = block(own, means, means)
    logits = [[-np.sum((q - p) ** 2) / method.temperature for p in prototypes] for q in queries]
    return np.array(logits), support + queries


@pytest.mark.parametrize("transductive", [False, True])
def test_feat_is_what_it_says(transductive: bool) -> None:
    features, task = some_task(4, 6)
    method = Feat(temperature=5.0, auxiliary_temperature=3.0, balance=0.4, transductive=transductive)
    parameters = random_parameters(method, 6)
    own = {key.removeprefix("attention."): value.numpy() for key, value in parameters.items()}
    truth = torch.tensor([[0, 1, 2, 2, 1], [2, 2, 0, 1, 1]])
    logits, losses = method.training(parameters, features, task, Labels(truth))
    torch.testing.assert_close(method.head(parameters, features, task), logits)
    for i in range(2):
        expected, seen = feat_by_loops(method, own, features[i].amax(1).numpy(), LABELS[i].numpy())
        np.testing.assert_allclose(logits[i], expected, rtol=1e-9)
        known = [*LABELS[i].tolist(), *truth[i].tolist()]
        groups = [[row for row, label in zip(seen, known, strict=True) if label == c] for c in range(N_WAY)]
        centres = [np.mean(block(own, group, group), 0) for group in groups]
        second = 0.0
        for row, label in zip(seen, known, strict=True):
            second -= math.log(soft([-np.sum((row - centre) ** 2) / 3 for centre in centres])[label]) / len(seen)
        fit = -np.mean([math.log(soft(list(row))[label]) for row, label in zip(expected, truth[i], strict=True)])
        assert float(losses["auxiliary"][i]) == pytest.approx(second)
        assert float(losses["total"][i]) == pytest.approx(fit + 0.4 * second)


def test_feat_says_whether_it_is_transductive() -> None:
    assert [Feat(transductive=t).classifies_together for t in (False, True)] == [False, True]
    assert Feat() == Feat() != Feat(transductive=True)
    assert Feat(transductive=True).for_few_queries() == Feat()
