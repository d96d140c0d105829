"""From the options of `trident web` to a loaded network."""

from trident.backbones.pretrained import find_backbone
from trident.labelling.making import CONV4, HINT, chosen_backbone
from trident.web.feature_network import FeatureNetwork
from trident.web.labels import Network
from trident.web.weight_store import WeightStore


def open_network(backbone: str, weights: str, device: str) -> Network:
    """Chooses as `trident predict` does: pretrained features if they are installed, else the included weights."""
    chosen = chosen_backbone(backbone, weights)
    if chosen != CONV4:
        return FeatureNetwork(find_backbone(chosen, device))
    return WeightStore(weights, device, HINT if (backbone, weights) == ("auto", "auto") else None)
