"""Asynchronous actors: rollouts that are collected while the learner learns, with policies of a little before."""

from __future__ import annotations

from lightning_rl.data.actors.base import ActorBackend, ActorOptions, ActorSetup, BoundedLag, RolloutSource, StartMethod
from lightning_rl.data.actors.processes import ProcessActors
from lightning_rl.data.actors.ray import RayActors

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
