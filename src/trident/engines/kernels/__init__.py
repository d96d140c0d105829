"""Triton kernels for the convolution stacks. They need an NVIDIA GPU; only `engines.fused` imports them.

Every kernel works on many tasks at once. Each task has its own weights. Feature maps are channels last, (task, image,
height, width, channel), in 16 or 32 bits. Products and statistics accumulate in 32 bits. For a sum over a task, each
program writes its own partial sum, and the partial sums are added in a fixed order: results are reproducible.

Names: a `tangent` is a derivative along a direction, written y' in formulas; a `gradient` is that of the loss.
"""
