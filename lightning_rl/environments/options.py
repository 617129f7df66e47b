"""Wrappers that are asked for by name: which there are, and in what order they go around an environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium import wrappers
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import vector as vector_wrappers

from lightning_rl.environments.autoreset import autoreset_mode
from lightning_rl.environments.frames import VectorFrameStack, stack_frames
from lightning_rl.environments.masks import MaskedEnvironment, check_source
from lightning_rl.environments.previous import PreviousStep, VectorPreviousStep
from lightning_rl.environments.repeat import learned_repeat
from lightning_rl.environments.rewards import (
    RewardClip,
    RewardTransform,
    check_reward_options,
    make_reward_transform,
)
from lightning_rl.environments.vector_masks import MaskedVectorEnvironment
from lightning_rl.validation import check, check_bool, check_positive_int


@dataclass(frozen=True)
class WrapperOptions:
    """Options that become wrappers.

    From the environment outwards: time limit, repeated actions, the user's wrappers; then learned repeats, rewards,
    stacked frames, flat observations, the previous action and reward, masks of invalid actions.

    Args:
        max_episode_steps: Steps of the environment after which an episode is truncated; None: as registered.
        action_repeat: Steps of the environment for each action.
        learned_action_repeat: How often the policy may have an action taken, as `max`, or with a `gamma`; None: once.
        reward_scale: Factor of rewards, in training.
        reward_clip: Bounds of rewards after that, in training: `abs_one`, `soft_asymmetric` or a number.
        frame_stack: Steps in an observation; None: one, without a dimension for it.
        flatten_observations: Observations become one vector.
        previous_action: Observations say what was done in the step before.
        previous_reward: Observations say what that earned, as it is learned from.
        action_mask: Where observations get masks of invalid actions from: `info.<key>`, `observation.<path>` or
            `method.<name>`.
    """

    max_episode_steps: int | None = None
    action_repeat: int = 1
    learned_action_repeat: int | dict[str, float] | None = None
    reward_scale: float = 1.0
    reward_clip: RewardClip | None = None
    frame_stack: int | None = None
    flatten_observations: bool = False
    previous_action: bool = False
    previous_reward: bool = False
    action_mask: str | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        check_positive_int("action_repeat", self.action_repeat)
        learned_repeat(self.learned_action_repeat)
        for name in ("max_episode_steps", "frame_stack"):
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        for name in ("flatten_observations", "previous_action", "previous_reward"):
            check_bool(name, getattr(self, name))
        check_reward_options(self.reward_scale, self.reward_clip)
        if self.action_mask is not None:
            check_source(self.action_mask)
            # Masks are found after both have been applied.
            is_observed = self.action_mask.startswith("observation.")
            expected = (
                f"{{}} with action_mask={self.action_mask!r}: only masks from info.<key> and method.<name> go with it"
            )
            check(self.frame_stack is None or not is_observed, "frame_stack", self.frame_stack, expected.format("None"))
            flat = self.flatten_observations and is_observed
            check(not flat, "flatten_observations", True, expected.format("False"))

    @property
    def reward_transform(self) -> RewardTransform | None:
        """What becomes of rewards; None if nothing does."""
        return make_reward_transform(self.reward_scale, self.reward_clip)

    def check_atari(self, clips_rewards: bool) -> None:
        """Raise where the preprocessing of Atari games does the same already.

        Raises:
            ConfigurationError: Frames would be stacked, actions repeated or rewards clipped twice.
        """
        stacks = self.frame_stack is not None
        check(not stacks, "frame_stack", self.frame_stack, "None for Atari games, which have atari.frame_stack")
        skips = self.action_repeat != 1
        check(not skips, "action_repeat", self.action_repeat, "1 for Atari games, which have atari.frame_skip")
        if clips_rewards:
            expected = "with Atari games only beside atari.clip_rewards=False"
            check(self.reward_scale == 1, "reward_scale", self.reward_scale, f"1; other values {expected}")
            check(self.reward_clip is None, "reward_clip", self.reward_clip, f"None; other values {expected}")

    def wrap(
        self, env: gymnasium.Env[Any, Any], evaluation: bool, clips: RewardTransform | None = None
    ) -> gymnasium.Env[Any, Any]:
        """Apply all options but the limit and the repetition to one environment.

        Args:
            env: The environment, with the user's own wrappers.
            evaluation: Leave its rewards alone; what observations say of the previous one is as in training.
            clips: What else becomes of rewards in training and not in evaluation.
        """
        transform = self.reward_transform
        if transform is not None and not evaluation:
            env = wrappers.TransformReward(env, transform)
        if self.frame_stack is not None:
            env = stack_frames(env, self.frame_stack)
        if self.flatten_observations:
            env = wrappers.FlattenObservation(env)
        if self.previous_action or self.previous_reward:
            # Learned repeats say themselves what clipped rewards would have earned.
            clips = clips if self.learned_action_repeat is None else None
            shown = (transform or clips) if evaluation else None
            env = PreviousStep(env, self.previous_action, self.previous_reward, shown)
        return env if self.action_mask is None else MaskedEnvironment(env, self.action_mask)

    def wrap_vector(
        self, env: VectorEnv[Any, Any, Any], evaluation: bool, clips: RewardTransform | None = None
    ) -> VectorEnv[Any, Any, Any]:
        """Do the same to environments that come vectorised.

        Raises:
            ConfigurationError: An option cannot be applied to them.
        """
        transform = self.reward_transform
        if transform is not None and not evaluation:
            env = vector_wrappers.TransformReward(env, transform)
        if self.frame_stack is not None:
            env = VectorFrameStack(env, self.frame_stack)
        if self.flatten_observations:
            same_step = autoreset_mode(env) is AutoresetMode.SAME_STEP
            expected = "False with environments that reset in the step that ends an episode; sync and async can do it"
            check(not same_step, "flatten_observations", True, expected)
            env = vector_wrappers.FlattenObservation(env)
        if self.previous_action or self.previous_reward:
            shown = (transform or clips) if evaluation else None
            env = VectorPreviousStep(env, self.previous_action, self.previous_reward, shown)
        return env if self.action_mask is None else MaskedVectorEnvironment(env, self.action_mask)

    def wrap_tensors(self, env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
        """Apply what can be applied to training environments that speak tensors: the options of rewards.

        Raises:
            ConfigurationError: Another option is set.
        """
        for name in ("frame_stack", "flatten_observations", "previous_action", "previous_reward", "action_mask"):
            value = getattr(self, name)
            check(not value, name, value, "its default for environments that speak tensors, which can do it themselves")
        transform = self.reward_transform
        return env if transform is None else vector_wrappers.TransformReward(env, transform)
