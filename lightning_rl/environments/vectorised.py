"""Environments that come vectorised: by their own authors, or by EnvPool."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from lightning_rl.environments.atari import AtariPreprocessing
from lightning_rl.environments.errors import is_failure, summary
from lightning_rl.environments.lives import NativeLives, VectorGameScore
from lightning_rl.environments.registry import missing_package, unknown_id
from lightning_rl.environments.spec import EnvironmentSpec
from lightning_rl.validation import ConfigurationError, check


def make_native(
    spec: EnvironmentSpec, gym_spec: EnvSpec, atari: AtariPreprocessing | None, num_envs: int, seeds: list[int]
) -> tuple[VectorEnv[Any, Any, Any], np.ndarray[Any, Any] | int]:
    """Return the environment's own vectorised version, and what to seed it with."""
    if gym_spec.vector_entry_point is None:
        raise ConfigurationError(
            f"backend={spec.backend!r} is not valid: {spec.env_id} registers no vector_entry_point; expected sync, "
            "async or envpool"
        )
    limit = spec.options.max_episode_steps
    kwargs = limited(limit)
    if atari is not None:
        atari = atari.for_evaluation() if spec.evaluation else atari
        # SAME_STEP wastes no step on resets; the other native environments choose for themselves.
        kwargs = atari.native_kwargs(limit) | {"autoreset_mode": AutoresetMode.SAME_STEP}
    kwargs |= spec.env_kwargs
    if atari is not None:
        clips_rewards, kwargs["reward_clipping"] = kwargs["reward_clipping"], False  # scores need the raw ones
    with explained(spec, gym_spec):
        env = gymnasium.make_vec(gym_spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    if atari is not None:
        env = VectorGameScore(env, clips_rewards)
        env = NativeLives(env) if atari.episodic_life else env
    return env, seeds[0] if atari is None else np.asarray(seeds)


def make_envpool(
    spec: EnvironmentSpec, num_envs: int, seeds: list[int]
) -> tuple[VectorEnv[Any, Any, Any], AtariPreprocessing | None]:
    """Return EnvPool's environments, and the preprocessing of an Atari game.

    Raises:
        ConfigurationError: The task is unknown or needs something that is not installed, or an option does not fit.
    """
    import envpool

    task = spec.env_id.removeprefix("ALE/")
    known = envpool.list_all_envs()
    if task not in known:
        raise unknown_id(spec.env_id, known)
    with explained(spec):
        options = envpool.make_spec(task).config._fields
    atari = spec.atari_options("reward_clip" in options)
    limit = spec.options.max_episode_steps
    expected = "None for Procgen games, whose own limit EnvPool leaves as it is"
    check(limit is None or "num_levels" not in options, "max_episode_steps", limit, expected)
    kwargs: dict[str, Any] = {"num_envs": num_envs, "env_seed": seeds} | limited(limit)
    if atari is not None:
        kwargs |= (atari.for_evaluation() if spec.evaluation else atari).envpool_kwargs()
        if task != spec.env_id:  # an ALE id: keep its stickiness, which EnvPool does not
            kwargs.setdefault("repeat_action_probability", 0.25)
    with explained(spec), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Box (low|high)'s precision")  # EnvPool's own declarations
        env: Any = envpool.make(task, env_type="gymnasium", **(kwargs | spec.env_kwargs))
        env = _BatchedSpaces(env)
    return env if atari is None else VectorGameScore(env, clips_rewards=False), atari


# No type arguments: VectorWrapper takes none before Gymnasium 1.4.
class _BatchedSpaces(VectorWrapper):
    """Gives the spaces of the batch, as vector wrappers expect, where EnvPool gives those of one environment."""

    def __init__(self, env: Any) -> None:  # noqa: ANN401
        super().__init__(env)
        self.observation_space = batch_space(env.single_observation_space, env.num_envs)
        self.action_space = batch_space(env.single_action_space, env.num_envs)


def limited(max_episode_steps: int | None) -> dict[str, Any]:
    """Return a time limit as an argument of `gymnasium.make` and its like."""
    return {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}


@contextlib.contextmanager
def explained(spec: EnvironmentSpec, gym_spec: EnvSpec | None = None) -> Iterator[None]:
    """Turn whatever the making of an environment raises into an error that says what to change."""
    try:
        yield
    except ConfigurationError:
        raise
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        if gym_spec is None:
            raise ConfigurationError(
                f"env_id={spec.env_id!r} needs something that is not installed: {error}"
            ) from error
        raise missing_package(gym_spec, error) from error
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ConfigurationError(
            f"env_id={spec.env_id!r} cannot be made with env_kwargs={spec.env_kwargs!r}: {summary(error)}"
        ) from error
