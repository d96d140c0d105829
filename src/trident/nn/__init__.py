"""The parts of the network. Each one declares its parameters and computes with a dictionary of them.

Every tensor carries a leading task axis, parameters too: in the inner loop each task has weights of its own. Feature
maps are channels last: (task, image, height, width, channel).
"""
