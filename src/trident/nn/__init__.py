"""The layers of the networks. Each one creates its parameters and computes with a dictionary of them.

Every tensor has a leading task axis. In the inner loop each task has its own weights, so the parameters of the layers
(`Linear`, `Conv4`, `Decoder` and so on) have it too. Heads on features share their parameters between tasks: there they
have no task axis, and a linear layer is computed with `linear`. Feature maps are channels last: (task, image, height,
width, channel).
"""
