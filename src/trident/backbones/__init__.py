"""Backbones, the networks that turn images into features. A recipe's [backbone] table names one of them."""

# Import paths, so that a list of names needs no torch.
BACKBONES = {
    "conv4": "trident.backbones.conv4:Conv4Backbone",
    "frozen": "trident.backbones.frozen:FrozenBackbone",
}
