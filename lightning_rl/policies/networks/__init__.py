"""Encoders: observation space in, feature vector out."""

from __future__ import annotations

from lightning_rl.policies.networks.images import ImpalaEncoder, NatureEncoder
from lightning_rl.policies.networks.make import Network, make_encoder, network_to_plain_data
from lightning_rl.policies.networks.mlp import DiscreteEncoding, MLPEncoder, embedding_size

__all__ = [
    "DiscreteEncoding",
    "ImpalaEncoder",
    "MLPEncoder",
    "NatureEncoder",
    "Network",
    "embedding_size",
    "make_encoder",
    "network_to_plain_data",
]
