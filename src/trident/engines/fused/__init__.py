"""The fast engine: the gradients of `engines.plain`, with hand-written passes over the convolution stacks.

The two encoders and the decoder are nearly all of the work. Each has four hand-written passes: forward, backward, the
tangent (the forward-mode derivative of the outputs) and the tangent of the backward pass. The latents, AttFEX, the
classifier and the losses are small and left to autograd.
"""

import importlib.util
import os
import shutil

import torch

from trident.backbones.conv4 import Conv4Backbone
from trident.engines.learners import learners_of
from trident.methods.trident.network import Trident
from trident.recipes.recipe import Recipe

CHANNELS = (16, 32, 64)


def why_not_fused(device: str, recipe: Recipe, precision: str) -> str | None:
    """Why the fused engine cannot run a recipe on a device, or None if it can."""
    backbone, method = recipe.backbone, recipe.method
    if "fused" not in learners_of(type(method)):
        return f"{method.about.title} has no code for it"
    if torch.device(device).type != "cuda" or torch.version.hip is not None:
        return "it needs an NVIDIA GPU"
    if not isinstance(backbone, Conv4Backbone):
        return "it computes conv4, and the recipe has another backbone"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    if importlib.util.find_spec("triton") is None:
        return "it needs Triton, which comes with torch for CUDA"
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))):
        return "it needs a C compiler, with which Triton builds its launchers"
    if recipe.protocol.batch_norm != "transductive":
        return f"it takes transductive batch norm only, and protocol.batch_norm is '{recipe.protocol.batch_norm}'"
    widths = {backbone.channels}
    if isinstance(method, Trident):
        widths.add(method.semantic_channels or backbone.channels)
    if not widths <= set(CHANNELS):
        return f"it takes 16, 32 or 64 channels, and the recipe has {' and '.join(map(str, sorted(widths)))}"
    if 64 in widths and (precision in ("fp32", "tf32") or capability < (9, 0)):
        return "it takes 64 channels only in 16 bits, and with compute capability 9.0 or more"
    if backbone.image_size % 2:
        return f"it takes images of an even size, and backbone.image_size is {backbone.image_size}"
    if isinstance(method, Trident) and method.unlabelled_weight:
        return "it takes inner steps on the support set alone, and method.unlabelled_weight is not 0"
    return None
