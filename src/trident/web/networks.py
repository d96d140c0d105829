"""From the options of `trident web` to a loaded network."""

from trident.backbones.pretrained import INCLUDED, find_backbone
from trident.labelling.making import CONV4, HINT, chosen_backbone
from trident.web.feature_network import FeatureNetwork
from trident.web.labels import Network
from trident.web.weight_store import WeightStore


def open_network(backbone: str, weights: str, device: str) -> Network:
    """Chooses as `trident predict` does. Whoever runs the server is told if pretrained features would be better."""
    chosen = chosen_backbone(backbone, weights)
    if chosen == CONV4:
        return WeightStore(weights, device)
    return FeatureNetwork(find_backbone(chosen, device), HINT if (backbone, chosen) == ("auto", INCLUDED) else None)
