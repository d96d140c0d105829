"""TRIDENT: transductive decoupled variational inference for few-shot image classification."""

__version__ = "0.2.0"
