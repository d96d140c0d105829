"""TRIDENT: transductive decoupled variational inference for few-shot image classification."""

import os

# Where torch allocates with mimalloc, as it does on Arm, freed memory goes back to the system after 10 ms. Inner steps
# on large images free hundreds of megabytes and soon ask for them again: a quarter of their time would be page faults.
# The allocator reads this once, when torch is loaded; other allocators do not know it.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")  # milliseconds

__version__ = "0.2.0"
