"""What images become features by. Which backbones there are; a recipe's [backbone] table names one."""

# Import paths, so that a list of names needs no torch.
BACKBONES = {
    "conv4": "trident.backbones.conv4:Conv4Backbone",
    "frozen": "trident.backbones.frozen:FrozenBackbone",
}
