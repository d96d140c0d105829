"""SIB, SSR and MetaQDA against their equations, with autograd in the place of derivatives written by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesian_heads import (
    N_WAY,
    case_of,
    logits_of,
    unit,
)
from trident.errors import TridentError
from trident.methods.base import MEAN
from trident.methods.bayesian.metaqda import MetaQda
from trident.methods.transductive.sib import SyntheticInformationBottleneck
from trident.methods.transductive.ssr import SelfSupervisedReranking
from trident.settings import EpisodeSpec


def test_the_synthetic_information_bottleneck_is_what_it_says() -> None:
    head = SyntheticInformationBottleneck(rate=0.1)
    case = case_of(head)
    p = case.parameters
    network = torch.nn.Sequential(
        torch.nn.Linear(3, 24), torch.nn.ReLU(), torch.nn.BatchNorm1d(24),
        torch.nn.Linear(24, 24), torch.nn.ReLU(), torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 3),
    ).double()  # fmt: skip
    names = ["network.0", "network.0.norm", "network.1", "network.1.norm", "network.2"]
    places = dict(zip((0, 2, 3, 5, 6), names, strict=True))
    own = {f"{at}.{part}": p[f"{name}.{part}"] for at, name in places.items() for part in ("weight", "bias")}
    network.load_state_dict(own, strict=False)
    found = logits_of(head, case)
    for index in range(2):
        rows, labels = F.normalize(case.features[index], dim=1), case.task.support_labels[index]
        support, queries = rows[: len(labels)], rows[len(labels) :]
        w = p["start"] * torch.stack([support[labels == c].mean(0) for c in range(N_WAY)])

        def logits(w: Tensor, queries: Tensor = queries) -> Tensor:
            return p["scale"] * (F.cosine_similarity(queries[:, None], w[None], dim=2) + p["shift"])

        for _ in range(3):
            w = w.detach().requires_grad_()
            scores = logits(w)
            (gradient,) = torch.autograd.grad(scores, w, network(scores.detach()).detach())
            w = w - 0.1 * gradient
        torch.testing.assert_close(found[index], logits(w).detach())
    assert not torch.allclose(logits_of(replace(head, steps=0), case), found, atol=1e-3)


@pytest.mark.parametrize("size", [8, 30])
def test_self_supervised_reranking_is_what_it_says(size: int) -> None:
    head = SelfSupervisedReranking(rate=0.1, width=6, steps=2)
    case = case_of(head, size=size)  # 22 images: with 30 features, only their span is computed with
    p = case.parameters

    def network(update: str, inputs: Tensor) -> Tensor:
        x = inputs
        for layer in range(3):
            name = f"{update}.{layer}"
            x = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()
            x = p[f"{name}.weight"] @ (p[f"{name}.norm.weight"] * x + p[f"{name}.norm.bias"]) + p[f"{name}.bias"]
            x = x.clamp(min=0) if layer < 2 else x
        return x

    def inputs_of(cosines: Tensor, r: int) -> Tensor:
        values = cosines.detach()[r].tolist()
        order = [r]
        order += sorted(range(N_WAY), key=lambda j: -values[j])
        order += sorted(range(N_WAY, len(cosines)), key=lambda j: -values[j])
        pairs = [(a, b) for a in range(N_WAY + 1) for b in range(a + 1, len(order))]
        return cosines[[order[a] for a, _ in pairs], [order[b] for _, b in pairs]]

    found = logits_of(head, case)
    for index in range(2):
        rows, labels = F.normalize(case.features[index], dim=1), case.task.support_labels[index]
        prototypes = torch.stack([rows[: len(labels)][labels == c].mean(0) for c in range(N_WAY)])
        prototypes, queries = prototypes.requires_grad_(), rows[len(labels) :].requires_grad_()
        for _ in range(2):
            for update in ("prototypes", "queries"):
                prototypes, queries = prototypes.detach().requires_grad_(), queries.detach().requires_grad_()
                moving = prototypes if update == "prototypes" else queries
                vectors = torch.cat([prototypes, queries])
                cosines = F.cosine_similarity(vectors[:, None], vectors[None], dim=2)
                inputs = [inputs_of(cosines, r) for r in range(len(cosines))]
                synthetic = [network(update, one) for one in inputs]
                (gradient,) = torch.autograd.grad(inputs, moving, synthetic)
                if update == "prototypes":
                    prototypes = prototypes - 0.1 * gradient
                else:
                    queries = queries - 0.1 * gradient
        expected = p["scale"] * F.cosine_similarity(queries[:, None], prototypes[None], dim=2)
        torch.testing.assert_close(found[index], expected.detach(), rtol=0, atol=1e-5)


def test_reranking_takes_tasks_of_one_size() -> None:
    head = SelfSupervisedReranking(width=6)
    trained = EpisodeSpec(3, 1, 5)
    head.check_episode(trained, EpisodeSpec(3, 5, 5))
    with pytest.raises(TridentError, match="classify 3 ways, not 4"):
        head.check_episode(trained, EpisodeSpec(4, 1, 5))
    with pytest.raises(TridentError, match=r"take 15 queries in a task \(5 queries per class\), not 12"):
        head.check_episode(trained, EpisodeSpec(3, 1, 4))
    case = case_of(head)
    with pytest.raises(TridentError, match="as many queries at once as in training"):
        head.head(case.parameters, case.features[:, :-1], replace(case.task, images=case.features[:, :-1]))


@pytest.mark.parametrize("blend", [0.0, 0.5])
def test_metaqda_is_what_it_says(blend: float) -> None:
    head = MetaQda(dimensions=5, blend=blend)
    case = case_of(head)
    p = {key: value.numpy() for key, value in case.parameters.items()}
    d, m, kappa = 5, p["prior.mean"], abs(float(p["prior.kappa"])) + 1e-6
    nu, lower = max(float(p["prior.nu"]), d - 1 + 1e-6), np.tril(p["prior.lower"])
    found = logits_of(head, case)
    for index in range(2):
        support, labels, queries, _ = case.of_task(index)
        project = [p["projection"] @ unit(row - p[MEAN]) for row in np.concatenate([support, queries])]
        xs, qs = project[: len(labels)], project[len(labels) :]
        for c in range(N_WAY):
            mine = [x for x, label in zip(xs, labels, strict=True) if label == c]
            n = len(mine)
            mu = (kappa * m + sum(mine)) / (kappa + n)
            s = lower @ lower.T + 1e-6 * np.eye(d) + sum(np.outer(x, x) for x in mine)
            s = s + kappa * np.outer(m, m) - (kappa + n) * np.outer(mu, mu)
            covariance = s / (nu + n + d + 2)
            metric = (1 - blend) * np.linalg.inv(covariance) + blend * np.eye(d)
            for i, x in enumerate(qs):
                distance = float((x - mu) @ metric @ (x - mu))
                assert float(found[index, i, c]) == pytest.approx(-distance, abs=1e-7)
