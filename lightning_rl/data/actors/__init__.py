"""Asynchronous actors: they collect rollouts while the learner trains, with slightly older policies."""

from __future__ import annotations

from lightning_rl.data.actors.base import ActorConfig, ActorOptions, Actors, ActorSetup
from lightning_rl.data.actors.processes import ProcessActors
from lightning_rl.data.actors.ray import RayActors

__all__ = ["ActorConfig", "ActorOptions", "ActorSetup", "Actors", "ProcessActors", "RayActors"]
