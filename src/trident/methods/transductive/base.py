"""Bases of heads that classify the queries together."""

from dataclasses import dataclass
from typing import Literal

from trident.methods.base import HeadOnFeatures, Method, NormalisedHead, setting
from trident.methods.metric.nearest_mean import NearestMean


@dataclass(frozen=True)
class TransductiveHead(HeadOnFeatures):
    """Base of heads that learn from the queries. A few queries go to the nearest class mean instead."""

    def for_few_queries(self) -> Method:
        return NearestMean()


@dataclass(frozen=True)
class FixedShapeHead(TransductiveHead, NormalisedHead):
    """Base of heads whose parameters depend on the number of classes. They take no other number after training."""

    normalisation: Literal["UN", "L2N", "CL2N"] = setting(
        "L2N", "normalisation of features: none, unit length, or centred on the training images and unit length"
    )
