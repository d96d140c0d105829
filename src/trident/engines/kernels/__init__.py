"""Triton kernels for the convolution stacks. They need an NVIDIA GPU; only `engines.fused` imports them.

Every kernel works on many tasks at once, each task with weights of its own. Feature maps are channels last,
(task, image, height, width, channel), in 16 or 32 bits; products accumulate and statistics are kept in 32. Sums over a
task are written by each program to a place of its own and added up in a fixed order, so results are reproducible.

Names: a dot of the mathematics, as in dy/dt, is spelled `tangent`; `gradient` is the loss's with respect to a thing.
"""
