"""TRIDENT: transductive decoupled variational inference for few-shot image classification."""

from trident.allocator import keep_freed_memory

keep_freed_memory()

__version__ = "0.2.0"
