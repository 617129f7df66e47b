"""Asynchronous actors: rollouts that are collected while the learner learns, with policies of a little before."""

from lightning_rl.actors.lag import BoundedLag
from lightning_rl.actors.options import ActorBackend, ActorOptions, RolloutSource, StartMethod
from lightning_rl.actors.processes import ProcessActors
from lightning_rl.actors.ray_actors import RayActors
from lightning_rl.actors.worker import ActorSetup

__all__ = [
    "ActorBackend",
    "ActorOptions",
    "ActorSetup",
    "BoundedLag",
    "ProcessActors",
    "RayActors",
    "RolloutSource",
    "StartMethod",
]
