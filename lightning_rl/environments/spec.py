"""Description of the environments of a run: id, backend and wrapper options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import gymnasium
from gymnasium import wrappers
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.wrappers import vector as vector_wrappers

from lightning_rl.environments.atari import AtariPreprocessing
from lightning_rl.environments.wrappers.action_mask import MaskedActions, ReadMasks, check_source
from lightning_rl.environments.wrappers.action_repeat import learned_repeat
from lightning_rl.environments.wrappers.frame_stack import FrameStack
from lightning_rl.environments.wrappers.previous_step import PreviousStep
from lightning_rl.environments.wrappers.rewards import (
    RewardClip,
    RewardTransform,
    check_reward_options,
    make_reward_transform,
)
from lightning_rl.environments.wrappers.vector_history import FlatObservations
from lightning_rl.validation import (
    ClassSpec,
    check,
    check_bool,
    check_keywords,
    check_module,
    check_number,
    check_positive_int,
    import_class,
    is_loading,
    is_one_of,
)


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

    @property
    def changes_observations(self) -> bool:
        """Whether vector wrappers change what single environments observe."""
        names = ("frame_stack", "flatten_observations", "previous_action", "previous_reward", "action_mask")
        return any(getattr(self, name) for name in names)

    def wrap(self, env: gymnasium.Env[Any, Any], evaluation: bool) -> gymnasium.Env[Any, Any]:
        """Apply what belongs into the process of one environment: options of rewards, and the reading of masks.

        Args:
            env: The environment, with the user's own wrappers.
            evaluation: Leave its rewards alone.
        """
        if self.reward_transform is not None and not evaluation:
            env = wrappers.TransformReward(env, self.reward_transform)
        return env if self.action_mask is None else ReadMasks(env, self.action_mask)

    def wrap_vector(
        self, env: VectorEnv[Any, Any, Any], evaluation: bool, clips: RewardTransform | None = None
    ) -> VectorEnv[Any, Any, Any]:
        """Apply the options of observations to the environments of any backend.

        Args:
            env: The environments.
            evaluation: Whether their rewards are left alone; what observations say of the previous one is as in
                training.
            clips: What else becomes of rewards in training and not in evaluation.
        """
        if self.frame_stack is not None:
            env = FrameStack(env, self.frame_stack)
        if self.flatten_observations:
            env = FlatObservations(env)
        if self.previous_action or self.previous_reward:
            # Learned repeats say themselves what clipped rewards would have earned.
            clips = clips if self.learned_action_repeat is None else None
            shown = (self.reward_transform or clips) if evaluation else None
            env = PreviousStep(env, self.previous_action, self.previous_reward, shown)
        return env if self.action_mask is None else MaskedActions(env, self.action_mask)

    def wrap_rewards(self, env: VectorEnv[Any, Any, Any], evaluation: bool = False) -> VectorEnv[Any, Any, Any]:
        """Apply the options of rewards to environments that come vectorised."""
        transform = None if evaluation else self.reward_transform
        return env if transform is None else vector_wrappers.TransformReward(env, transform)

    def wrap_tensors(self, env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
        """Apply what can be applied to training environments that speak tensors: the options of rewards.

        Raises:
            ConfigurationError: Another option is set.
        """
        for name in ("frame_stack", "flatten_observations", "previous_action", "previous_reward", "action_mask"):
            value = getattr(self, name)
            check(not value, name, value, "its default for environments that speak tensors, which can do it themselves")
        return self.wrap_rewards(env)


WRAPPERS = (gymnasium.Wrapper, VectorWrapper)
"""What wrappers are subclasses of."""
Backend = Literal["sync", "async", "native", "torch", "envpool"]
OnEnvFailure = Literal["raise", "restart"]


@dataclass(frozen=True)
class EnvironmentSpec:
    """Everything needed to make an environment, as plain data.

    Args:
        env_id: Gymnasium id (`module:id` imports `module` first), or EnvPool task.
        env_kwargs: Arguments of the environment's constructor.
        wrappers: Applied in this order; classes of `gymnasium.Wrapper`, or of `gymnasium.vector.VectorWrapper`.
        backend: `sync` (in this process), `async` (a worker process each), `native` (the environment's own
            vectorised version), `torch` (one that speaks tensors) or `envpool`.
        atari: Preprocessing of Atari games; None means the defaults for Atari games and nothing for others.
        step_timeout: Seconds a worker process may take for a step or reset (`async` only); None: 120.
        on_env_failure: `raise`, or `restart`: replace an environment that fails (`sync` and `async` only).
        evaluation: Leave the environment's own rewards and episodes alone.
        options: Wrappers asked for by name, outside of `wrappers`.
        imports: Modules to import before the id is looked up, in worker processes too.
        filmed: Put a `Camera` around each environment (`sync` only).
    """

    env_id: str
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: tuple[ClassSpec, ...] = ()
    backend: Backend = "sync"
    atari: AtariPreprocessing | None = None
    step_timeout: float | None = None
    on_env_failure: OnEnvFailure = "raise"
    evaluation: bool = False
    options: WrapperOptions = field(default_factory=WrapperOptions)
    imports: tuple[str, ...] = ()
    filmed: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without making an environment."""
        choices = get_args(Backend)
        check(is_one_of(self.backend, choices), "backend", self.backend, f"one of {', '.join(choices)}")
        if self.step_timeout is not None:
            check(self.backend == "async", "step_timeout", self.step_timeout, "None unless backend is 'async'")
            # The system call that waits counts milliseconds in 32 bits.
            check_number("step_timeout", self.step_timeout, above=0, at_most=1e6)
        known = is_one_of(self.on_env_failure, get_args(OnEnvFailure))
        check(known, "on_env_failure", self.on_env_failure, "raise or restart")
        check(
            self.on_env_failure == "raise" or self.backend in ("sync", "async"),
            "on_env_failure",
            self.on_env_failure,
            f"'raise' with backend={self.backend!r}, whose environments cannot be replaced one by one",
        )
        for name, off in (("action_repeat", 1), ("learned_action_repeat", None)):
            repeats = getattr(self.options, name)
            check(
                repeats == off or self.backend in ("sync", "async"),
                name,
                repeats,
                f"{off} with backend={self.backend!r}, whose environments cannot be stepped one by one",
            )
        check_keywords("env_kwargs", self.env_kwargs)
        given = self.options.max_episode_steps is not None and "max_episode_steps" in self.env_kwargs
        check(not given, "max_episode_steps", self.options.max_episode_steps, "None beside that in env_kwargs")
        if is_loading():
            self._check_trusted()

    def _check_trusted(self) -> None:
        """Check what loaded data names: environments are made later, when nobody knows where the spec came from."""
        for name in self.imports:
            check_module("imports", name, name)
        if module := self.env_id.rpartition(":")[0]:
            check_module("env_id", self.env_id, module)
        for wrapper in self.wrappers:
            import_class("wrappers", wrapper["class_path"], WRAPPERS)

    def for_evaluation(self, wrappers: Iterable[ClassSpec]) -> EnvironmentSpec:
        """Return the spec of the evaluation environments, with only the given wrappers."""
        return replace(self, wrappers=tuple(wrappers), evaluation=True)

    def for_filming(self, env_kwargs: dict[str, Any] | None = None) -> EnvironmentSpec:
        """Return the spec of the same environments one by one in this process, each with a camera.

        Args:
            env_kwargs: More arguments of the constructor: the size of the picture, a camera of the simulation.

        Raises:
            ConfigurationError: The backend has no single environments.
        """
        expected = "sync, async, or native where the id has single environments too; EnvPool and tensors cannot render"
        check(self.backend in ("sync", "async", "native"), "backend", self.backend, expected)
        kwargs = self.env_kwargs | (env_kwargs or {}) | {"render_mode": "rgb_array"}
        # One that failed and was replaced would have lost the frames before.
        options: dict[str, Any] = {"backend": "sync", "step_timeout": None, "on_env_failure": "raise"}
        return replace(self, env_kwargs=kwargs, filmed=True, **options)

    def atari_options(self, is_game: bool) -> AtariPreprocessing | None:
        """Return the preprocessing to apply, None where the environment is no Atari game.

        Raises:
            ConfigurationError: Options were given for an environment that is none.
        """
        if is_game:
            atari = self.atari or AtariPreprocessing()
            self.options.check_atari(atari.clip_rewards)
            return atari
        check(self.atari is None, "atari", self.atari, f"None, since {self.env_id} is no Atari game with frames")
        return None
