"""TRIDENT's settings. Where the paper and its released code differ, a setting's help says which value is whose."""

import math
from abc import ABC
from dataclasses import dataclass, replace
from typing import Literal, Self

from trident.methods.base import tunable
from trident.methods.inner_loop.base import InnerLoopMethod
from trident.methods.trident.objective import TERMS, ObjectiveSettings
from trident.settings import require, require_at_least, setting


@dataclass(frozen=True)
class TridentSettings(InnerLoopMethod, ObjectiveSettings, ABC):
    inner_optimizer: Literal["sgd", "adam"] = tunable(
        "sgd", "optimiser of the inner steps: plain gradient steps (Algorithm 2, released code) or Adam"
    )
    inner_rate: float = tunable(1e-3, "learning rate of the inner steps, the paper's alpha")
    inner_steps: int = tunable(5, "inner steps, the paper's n", most=100)
    label_latents: int = setting(64, "size of z_label", most=4096, least=1)
    semantic_latents: int = setting(64, "size of z_semantic", most=4096, least=1)
    semantic_channels: int | None = setting(
        None,
        "feature maps in each block of the semantic encoder and of the decoder; 'none' takes backbone.channels",
        most=4096,
        least=1,
    )
    semantic_batch_norm: Literal["set", "task"] = tunable(
        "set",
        "images whose statistics the semantic encoder's transductive batch norm takes: those of one set, support and "
        "queries apart (released code), or all of the task",
    )
    label_reads_semantic: bool = setting(
        True, "z_label is inferred from the image and z_semantic (paper), or from the image alone"
    )
    label_learns_to_reconstruct: bool = setting(
        True, "both latents learn from the reconstruction error (paper), or z_semantic alone"
    )
    classifier_width: int = setting(32, "hidden units between z_label and the logits", most=4096, least=1)
    classifier_start: Literal["learned", "prototypes"] = setting(
        "learned", "last layer before adaptation: learned (paper), or made from class means, for any number of classes"
    )
    classifier_features: Literal["plain", "unit"] = setting(
        "plain", "distances to prototypes are between features as they are, or scaled to unit length"
    )
    training_classes: int = setting(
        0,
        "number of training classes, for a second head that tells them all apart in training; 0 for no such head",
        most=100_000,
        least=0,
    )
    attfex: Literal["positional", "set", "off"] = setting(
        "positional", "AttFEX with one weight for each image position (paper), independent of the order, or none"
    )
    attfex_residual: bool = setting(False, "multiply features by 1 + G instead of G (paper)")
    attfex_width_m: int = setting(64, "feature maps that W_M extracts from the images of a task", most=1024, least=1)
    attfex_width_n: int = setting(32, "feature maps that W_N makes of them", most=1024, least=1)
    attention_activation: bool = setting(False, "activation after the query, key and value maps (5-shot: yes)")
    attention_scale: Literal["inside", "outside"] = setting(
        "inside", "1/sqrt(W'H') inside the softmax (released code) or outside (paper's equation)"
    )
    decoder_batch_norm: bool = setting(False, "batch norm in the decoder (mini 5-shot and tiered 1-shot: yes)")
    initial_log_var: float | None = setting(
        None, "start of the log-variance heads' bias; 'none' keeps the layer's random start, a variance near 1"
    )
    log_var_bound: float | None = setting(None, "squash log-variances smoothly into (-bound, bound); 'none' does not")
    unlabelled_weight: float = tunable(
        0.0,
        "weight, in the inner steps, of the evidence lower bound of the queries and unlabelled images, without the "
        "term of their labels",
        least=0,
    )
    refinements: int = tunable(
        0,
        "rounds, after the inner steps, in which prototypes are recomputed with the queries' soft labels",
        most=100,
        least=0,
    )
    training_refinements: int | None = setting(
        None, "the same in training; 'none' takes as many as at test", most=100, least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, "method", 0, *(f"{name}_weight" for name in TERMS))
        require(
            self.inner_steps > 0 or not self.unlabelled_weight,
            "method.unlabelled_weight needs method.inner_steps: without inner steps there is no loss at test",
        )
        require(
            self.log_var_bound is None or 0 < self.log_var_bound < math.inf,
            f"method.log_var_bound is {self.log_var_bound}: it must be above 0, or 'none'",
        )
        prototypes = self.classifier_start == "prototypes"
        require(
            prototypes or self.classifier_features == "plain",
            "method.classifier_features=unit needs method.classifier_start=prototypes: without prototypes there are no "
            "distances",
        )
        require(
            prototypes or not (self.refinements or self.training_refinements),
            "method.refinements needs method.classifier_start=prototypes: there is nothing else to refine",
        )

    @property
    def any_way(self) -> bool:
        return self.classifier_start == "prototypes"

    @property
    def positional(self) -> bool:
        return self.attfex == "positional"

    def in_training(self) -> Self:
        rounds = self.refinements if self.training_refinements is None else self.training_refinements
        return replace(self, refinements=rounds)

    def for_few_queries(self) -> Self:
        return replace(self, refinements=0)  # a few queries would pull the prototypes towards themselves

    def describe(self) -> str:
        rounds = f", {self.refinements} refinement{'' if self.refinements == 1 else 's'}" if self.refinements else ""
        whole = ", semantic batch norm over the task" if self.semantic_batch_norm == "task" else ""
        unlabelled = f" with unlabelled images (weight {self.unlabelled_weight:g})" if self.unlabelled_weight else ""
        return super().describe() + unlabelled + rounds + whole
