"""The layers of the networks. Each one creates its parameters and computes with a dictionary of them.

Every tensor has a leading task axis, parameters too: in the inner loop each task has its own weights. Feature maps are
channels last: (task, image, height, width, channel).
"""
