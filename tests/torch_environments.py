"""A small vector environment that speaks torch tensors, as simulators on a GPU do; registered as `Torch/Reach-v0`.

A point on a line is to be brought to a goal: `reach` is how far it may go in one step.
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from torch import Tensor

from lightning_rl.masks import ActionMask
from lightning_rl.nested import map_leaves


class Reach(VectorEnv[Tensor, Tensor, Tensor]):
    """Move towards the goal; the reward is minus the distance. Falls off at ±2, and time is up after `limit` steps.

    Args:
        num_envs: How many points.
        mode: How it resets: `SAME_STEP`, `NEXT_STEP` or `DISABLED`, as the value of `AutoresetMode`.
        tells_final: Whether `info` has the final observations (`SAME_STEP` only).
        limit: Steps until the time is up.
        kind: `box` actions move by as much as they say, `discrete` ones by -0.2, 0 or 0.2.
        spoil_at: The step, counted from the first reset, whose rewards are NaN in environment 1.
        device: Of all tensors.
    """

    def __init__(
        self,
        num_envs: int = 1,
        mode: str = AutoresetMode.SAME_STEP.value,
        tells_final: bool = True,
        limit: int = 7,
        kind: str = "box",
        spoil_at: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.mode = AutoresetMode(mode)
        self.metadata = {"autoreset_mode": self.mode}
        self.num_envs, self.tells_final, self.limit, self.kind = num_envs, tells_final, limit, kind
        self.spoil_at, self.device = spoil_at, torch.device(device)
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space: spaces.Space[Any] = spaces.Box(-0.2, 0.2, (1,), np.float32)
        if kind == "discrete":
            self.single_action_space = spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generator = torch.Generator(self.device)
        self.state = torch.zeros(num_envs, 2, device=self.device)
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.ended = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self.total_steps = 0
        self.seen_types: set[type] = set()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        if seed is not None:
            self.generator.manual_seed(seed)
            self.total_steps = 0
        mask = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        if options and "reset_mask" in options:
            mask = options["reset_mask"]
        self.begin(mask)
        return self.state.clone(), {}

    def begin(self, mask: Tensor) -> None:
        fresh = torch.rand(self.num_envs, 2, generator=self.generator, device=self.device) * 2 - 1
        self.state = torch.where(mask.unsqueeze(1), fresh, self.state)
        self.steps = torch.where(mask, 0, self.steps)
        self.ended = self.ended & ~mask

    def step(self, actions: Tensor):
        self.seen_types.add(type(actions))
        self.total_steps += 1
        moves = (actions.float() - 1) * 0.2 if self.kind == "discrete" else actions.squeeze(-1)
        was_ended = self.ended.clone()
        moved = torch.stack([self.state[:, 0] + moves, self.state[:, 1]], 1)
        self.state = torch.where(was_ended.unsqueeze(1), self.state, moved)
        self.steps = torch.where(was_ended, self.steps, self.steps + 1)
        rewards = -(self.state[:, 0] - self.state[:, 1]).abs()
        if self.total_steps == self.spoil_at:
            rewards[1] = torch.nan
        terminated = (self.state[:, 0].abs() > 2) & ~was_ended
        truncated = (self.steps >= self.limit) & ~terminated & ~was_ended
        ended = terminated | truncated
        infos: dict[str, Any] = {}
        if self.mode is AutoresetMode.NEXT_STEP:
            self.begin(was_ended)
            rewards = torch.where(was_ended, 0.0, rewards)
            self.ended = ended
        elif self.mode is AutoresetMode.SAME_STEP:
            if self.tells_final:
                infos["final_obs"] = self.state.clone()
            self.begin(ended)
        return self.state.clone(), rewards, terminated, truncated, infos

    def state_dict(self) -> dict[str, Any]:
        names = ("state", "steps", "ended")
        return {name: getattr(self, name).clone() for name in names} | {
            "generator": self.generator.get_state(),
            "total_steps": self.total_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("state", "steps", "ended"):
            setattr(self, name, state[name].to(self.device, copy=True))
        self.generator.set_state(state["generator"])
        self.total_steps = state["total_steps"]


class OneWay(Reach):
    """Some moves are not valid, as a mask that is observed says, and raise: those to the left in every second step."""

    def __init__(self, num_envs: int = 1, mode: str = AutoresetMode.NEXT_STEP.value) -> None:
        super().__init__(num_envs, mode, tells_final=False, kind="discrete")
        parts = {"legal": ActionMask(3), "place": self.single_observation_space}
        self.single_observation_space = spaces.Dict(parts)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(self, **kwargs: Any):
        return self.observe(super().reset(**kwargs)[0]), {}

    def step(self, actions: Tensor):
        legal = self.legal.gather(1, actions.unsqueeze(1)).squeeze(1).bool()
        assert (legal | self.ended).all()  # an action in the place of a reset is none
        observations, *rest = super().step(actions)
        return self.observe(observations), *rest

    def observe(self, place: Tensor) -> dict[str, Tensor]:
        may_go_left = self.steps % 2 == 0
        self.legal = torch.stack([may_go_left, *[torch.ones_like(may_go_left)] * 2], 1).to(torch.int8)
        return {"legal": self.legal, "place": place}


class AsArrays(VectorWrapper):
    """The same environments as arrays."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        if options and "reset_mask" in options:
            options = {**options, "reset_mask": torch.from_numpy(options["reset_mask"])}
        observations, infos = self.env.reset(seed=seed, options=options)
        return map_leaves(Tensor.numpy, observations), infos

    def step(self, actions: Any):
        *values, infos = self.env.step(map_leaves(torch.from_numpy, actions))
        return *(map_leaves(Tensor.numpy, x) for x in values), map_leaves(Tensor.numpy, infos)


ID, MASKED_ID = "Torch/Reach-v0", "Torch/OneWay-v0"
if ID not in gymnasium.registry:
    gymnasium.register(ID, vector_entry_point=Reach)
    gymnasium.register(MASKED_ID, vector_entry_point=OneWay)
