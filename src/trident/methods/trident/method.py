"""TRIDENT as a method: the network of `network.py` with the settings of `settings.py`."""

from dataclasses import dataclass

from trident.backbones.conv4 import single_conv4
from trident.methods.base import About, Backbone, EpisodeSpec
from trident.methods.trident.network import Network
from trident.methods.trident.settings import TridentSettings


@dataclass(frozen=True)
class Trident(TridentSettings):
    """Two intertwined variational networks split an image into its class (z_label) and its looks (z_semantic).

    Learned: two Conv4 encoders, AttFEX, a classifier and a decoder, so that a few gradient steps on the support set
    adapt all of them to a task. At test the same steps are taken, then the queries are classified from z_label. With
    refinements, the class prototypes are moved towards the queries, which makes the method transductive. With
    attfex=positional, as published, weights are tied to the positions of images in a task.
    """

    about = About(
        "TRIDENT",
        "Singh & Jamali-Rad 2022",
        "Transductive Decoupled Variational Inference for Few-Shot Classification",
        transductive=True,
        analyses=("latents", "reconstructions"),
        any_way=False,
        positional=True,
    )

    def model(self, backbone: Backbone, episode: EpisodeSpec) -> Network:
        return Network(self, single_conv4(backbone, "TRIDENT"), episode)
