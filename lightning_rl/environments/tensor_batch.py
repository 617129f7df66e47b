"""Vector environments that speak tensors: their rewards, flags and observations stay on their device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from torch import Tensor

from lightning_rl.environments.contract import EnvironmentFailure, autoreset_mode, is_failure, summary
from lightning_rl.nested import Nested, leaves, map_leaves
from lightning_rl.validation import check


class TensorStep(NamedTuple):
    """What one step of `B` environments gave, as tensors on their device.

    Attributes:
        observations: Where the next action is chosen, `[B, ...]`, nested as the space is.
        rewards: `[B]`; 0 where not `valid`.
        terminated: `[B]`.
        truncated: `[B]`.
        valid: False where the environment was only being reset and ignored the action, `[B]`; None if nowhere.
        reached: The observations that the step led to, before any reset, `[B, ...]`, of which the rows of episodes that
            it ended count. None where the environments do not tell.
        infos: Gymnasium's vector info.
    """

    observations: Nested
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor | None
    reached: Nested | None
    infos: dict[str, Any]


class TensorEnvironments:
    """A vector environment of tensors whose steps mean the same in every autoreset mode.

    Nothing is read from the device while stepping, except in `DISABLED` mode, where this class has to know whether to
    reset. That everything is finite is seen once per rollout, by `check_finite`.

    Args:
        env: A `gymnasium.vector.VectorEnv` whose observations, rewards and flags are tensors, and which takes such. In
            `SAME_STEP` mode `info["final_obs"]`, if it is there, has the observations `[B, ...]` before resets.
        seed: Of its one random generator.

    Raises:
        ConfigurationError: It does not say in `metadata["autoreset_mode"]` how it resets.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], seed: int) -> None:
        self.env = env
        self.seed = seed
        self.mode = autoreset_mode(env)
        self.num_envs = env.num_envs
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.device = torch.device("cpu")
        """Of its tensors, known since the first reset."""
        self._resets_next: Tensor | None = None
        self._not_finite: Tensor | None = None
        self._steps = 0

    def reset(self) -> Nested:
        """Begin again with the seed, and return the first observations `[B, ...]`.

        Raises:
            ConfigurationError: They are no tensors.
            EnvironmentFailure: The environments raised.
        """
        self._steps = 0
        with self._named("reset"):
            observations, _ = self.env.reset(seed=self.seed)
        self.device = _device_of(self.env, observations)
        self._resets_next = None
        self._not_finite = None
        return observations

    def step(self, actions: Nested) -> TensorStep:
        """Step every environment once.

        Raises:
            EnvironmentFailure: The environments raised.
        """
        self._steps += 1
        with self._named("step"):
            observations, rewards, terminated, truncated, infos = self.env.step(actions)
        terminated, truncated = terminated.bool(), truncated.bool()
        ended = terminated | truncated
        valid: Tensor | None = None
        if self.mode is AutoresetMode.NEXT_STEP:
            if self._resets_next is not None:
                valid = ~self._resets_next
                rewards = torch.where(valid, rewards, 0)
            self._resets_next = ended
        reached = infos.get("final_obs") if self.mode is AutoresetMode.SAME_STEP else observations
        if self.mode is AutoresetMode.DISABLED and bool(ended.any()):
            reached = map_leaves(torch.clone, observations)
            # They may be the environment's own tensors, which its reset clears.
            rewards, terminated, truncated = rewards.clone(), terminated.clone(), truncated.clone()
            with self._named("reset"):
                observations, _ = self.env.reset(options={"reset_mask": ended})
        self._watch(observations, rewards)
        return TensorStep(observations, rewards, terminated, truncated, valid, reached, infos)

    def _watch(self, observations: Nested, rewards: Tensor) -> None:
        bad = ~torch.isfinite(rewards)
        for leaf in leaves(observations):
            if leaf.is_floating_point():
                bad = bad | _rows_not_finite(leaf)
        self._not_finite = bad if self._not_finite is None else self._not_finite | bad

    def check_finite(self, environments: Tensor, reached: Nested) -> None:
        """Raise if an observation or reward since the last call was not finite; reads from the device.

        Args:
            environments: Those whose episodes were cut off since then, `[K]`.
            reached: What these reached, `[K, ...]`, which stepping does not look at.

        Raises:
            EnvironmentFailure: Names the environments.
        """
        bad, self._not_finite = self._not_finite, None
        if bad is not None and len(environments):
            for leaf in leaves(reached):
                if leaf.is_floating_point():
                    bad[environments[_rows_not_finite(leaf)]] = True
        if bad is not None and bool(bad.any()):
            indices = bad.nonzero().flatten().tolist()
            shown = ", ".join(map(str, indices[:8])) + (", …" if len(indices) > 8 else "")
            raise EnvironmentFailure(f"environment {shown} returned an observation or reward that is NaN or infinite")

    def state_dict(self) -> dict[str, Any] | None:
        """Return where the environments are, if they can tell: `state_dict()` of the environment itself."""
        own: Any = self.env.unwrapped
        if self.env is not own or not hasattr(own, "state_dict") or not hasattr(own, "load_state_dict"):
            return None
        resets_next = None if self._resets_next is None else self._resets_next.cpu()
        return {"kind": "tensors", "environments": own.state_dict(), "resets_next": resets_next}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go to where the environments were; return whether that was possible."""
        own: Any = self.env.unwrapped
        if state["kind"] != "tensors" or self.env is not own or not hasattr(own, "load_state_dict"):
            return False
        self.reset()
        own.load_state_dict(state["environments"])
        self._resets_next = None if state["resets_next"] is None else state["resets_next"].to(self.device)
        return True

    def close(self) -> None:
        """Close the environments."""
        with self._named("close"):
            try:
                self.env.close()
            finally:
                self.env.closed = True  # or Gymnasium would try again when it is collected

    @contextlib.contextmanager
    def _named(self, where: str) -> Iterator[None]:
        """Raise an error that names the place, whatever the environments raise."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, EnvironmentFailure) or not is_failure(error):
                raise
            what = f"{summary(error)} (step {self._steps}, seed {self.seed})"
            raise EnvironmentFailure(f"the environments raised in {where}: {what}") from error


def _device_of(env: VectorEnv[Any, Any, Any], observations: Nested) -> torch.device:
    """Return the device of an environment's first observations.

    Raises:
        ConfigurationError: They are no tensors.
    """
    first: Any = next(leaves(observations))
    expected = f"'native', since {env} returns {type(first).__name__}, no tensors"
    check(isinstance(first, Tensor), "backend", "torch", expected)
    device: torch.device = first.device
    return device


def _rows_not_finite(x: Tensor) -> Tensor:
    """Return which rows of `x`, `[N, ...]`, have an entry that is NaN or infinite, `[N]`."""
    return ~torch.isfinite(x).reshape(len(x), -1).all(1)


# No type arguments: VectorWrapper takes none before Gymnasium 1.4.
class AsArrays(VectorWrapper):
    """A vector environment of tensors seen as one of arrays, for evaluation, where every step is looked at.

    Where the environments do not tell what an episode reached, that is the observation before its last step.
    """

    _observations: Nested

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
        """Reset; a mask in `options` becomes a tensor."""
        if options and "reset_mask" in options:
            options = {**options, "reset_mask": self._to_tensor(np.asarray(options["reset_mask"]))}
        self._observations, infos = self.env.reset(seed=seed, options=options)
        _device_of(self.env, self._observations)
        return map_leaves(to_array, self._observations), infos

    def step(self, actions: Any) -> Any:  # noqa: ANN401
        """Step with arrays, nested as the action space is."""
        before = self._observations
        same_step = autoreset_mode(self.env) is AutoresetMode.SAME_STEP
        if same_step:
            before = map_leaves(to_array, map_leaves(torch.clone, before))  # the environments may write over theirs
        observations, rewards, terminated, truncated, infos = self.env.step(map_leaves(self._to_tensor, actions))
        self._observations = observations
        if same_step:
            infos = {**infos, "final_obs": map_leaves(to_array, infos.get("final_obs", before))}
        flags = (to_array(rewards), to_array(terminated).astype(bool), to_array(truncated).astype(bool))
        return map_leaves(to_array, observations), *flags, infos

    def _to_tensor(self, x: np.ndarray[Any, Any]) -> Tensor:
        """Return a tensor on the device of the environments."""
        return torch.from_numpy(x).to(next(leaves(self._observations)).device)


def to_array(x: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401
    """Return a tensor's values as an array."""
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
