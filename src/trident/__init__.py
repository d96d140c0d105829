"""TRIDENT: transductive decoupled variational inference for few-shot image classification."""

import os

# mimalloc, torch's allocator on Arm, returns freed memory to the system after 10 ms. Inner steps on large images free
# hundreds of megabytes and soon allocate them again: a quarter of their time would be page faults. The allocator reads
# this once, when torch is loaded. Other allocators ignore it.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")  # milliseconds

__version__ = "0.2.0"
