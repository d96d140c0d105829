"""The base of heads that classify the queries together."""

from dataclasses import dataclass

from trident.methods.base import HeadOnFeatures, Method
from trident.methods.metric.nearest_mean import NearestMean


@dataclass(frozen=True)
class TransductiveHead(HeadOnFeatures):
    """Base of heads that learn from the queries. A few queries go to the nearest class mean instead."""

    def for_few_queries(self) -> Method:
        return NearestMean()
