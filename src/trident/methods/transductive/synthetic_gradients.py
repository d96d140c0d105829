"""Synthetic gradients, which a network predicts without labels: what SIB and SSR share."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from trident.methods.base import NormalisedHead, Parameters, setting
from trident.methods.transductive.base import TransductiveHead

LAYERS = (0, 1, 2)  # of a network


@dataclass(frozen=True)
class FixedShapeHead(TransductiveHead, NormalisedHead):
    """Base of heads whose parameters depend on the number of classes. They take no other number after training."""

    normalisation: Literal["UN", "L2N", "CL2N"] = setting(
        "L2N", "normalisation of features: none, unit length, or centred on the training images and unit length"
    )


def turning(pull: Tensor, directions: Tensor, lengths: Tensor) -> Tensor:
    """How far vectors with these directions and lengths turn: the part of a pull that does not change the length."""
    return (pull - (pull * directions).sum(2, keepdim=True) * directions) / lengths


def scaled_and_shifted(parameters: Parameters, name: str, values: Tensor) -> Tensor:
    return values * parameters[f"{name}.norm.weight"] + parameters[f"{name}.norm.bias"]
