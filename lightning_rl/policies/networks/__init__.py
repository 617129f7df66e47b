"""Encoders: observation space in, feature vector out."""

from __future__ import annotations

from lightning_rl.policies.networks.images import ImpalaEncoder, NatureEncoder
from lightning_rl.policies.networks.make import Network, make_encoder, network_to_plain_data
from lightning_rl.policies.networks.mlp import ACTIVATIONS, DiscreteEncoding, MLPEncoder, embedding_size
from lightning_rl.spaces import is_image

__all__ = [
    "ACTIVATIONS",
    "DiscreteEncoding",
    "ImpalaEncoder",
    "MLPEncoder",
    "NatureEncoder",
    "Network",
    "embedding_size",
    "is_image",
    "make_encoder",
    "network_to_plain_data",
]
