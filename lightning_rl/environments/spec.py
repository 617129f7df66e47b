"""Description of the environments of a run: id, backend and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import gymnasium
from gymnasium import wrappers
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.wrappers import vector as vector_wrappers

from lightning_rl.environments.atari import AtariPreprocessing
from lightning_rl.environments.wrappers.action_mask import MaskedActions, ReadMasks, check_source
from lightning_rl.environments.wrappers.action_repeat import learned_repeat
from lightning_rl.environments.wrappers.history import FlatObservations, FrameStack
from lightning_rl.environments.wrappers.previous_step import PreviousStep
from lightning_rl.environments.wrappers.rewards import (
    RewardClip,
    RewardTransform,
    check_reward_options,
    make_reward_transform,
)
from lightning_rl.validation import (
    ClassSpec,
    check,
    check_bool,
    check_keywords,
    check_module,
    check_names,
    check_number,
    check_positive_int,
    import_class,
    is_loading,
    is_one_of,
    to_class_specs,
)

WRAPPERS = (gymnasium.Wrapper, VectorWrapper)
"""What wrappers are subclasses of."""
Backend = Literal["sync", "async", "native", "torch", "envpool"]
OnEnvFailure = Literal["raise", "restart"]
_OF_OBSERVATIONS = ("frame_stack", "flatten_observations", "previous_action", "previous_reward", "action_mask")


@dataclass(frozen=True)
class EnvConfig:
    """Options of the environments.

    They are applied from the environment outwards: time limit, repeated actions, the user's wrappers; then learned
    repeats, rewards, stacked frames, flat observations, the previous action and reward, masks of invalid actions.

    Args:
        kwargs: Arguments of the environment's constructor.
        wrappers: `gymnasium.Wrapper` classes (`gymnasium.vector.VectorWrapper` for `native`, `torch` and `envpool`) as
            class paths or `{"class_path": ..., "init_args": ...}`, applied in this order in training and evaluation.
        training_wrappers: More wrappers, in training only: those that change rewards or end episodes early.
        atari: Options of the preprocessing of Atari games; other environments refuse any but the default.
        step_timeout: Seconds a worker process may take for one step or reset before it counts as hung (`async` only);
            None: 120.
        on_failure: What becomes of a run in which an environment raises, returns NaN, infinity, a wrong shape or a
            reward that is not a number, or whose worker process dies or hangs: `raise` ends it with an error that names
            environment, episode, seed and step; `restart` (`sync` and `async` only) replaces the environment by a new
            one, which begins with the next episode. The episode that was cut off counts as truncated, the step that
            failed is not learned from, `rollout/env_restarts` counts. Four failures without a step in between end the
            run.
        imports: Modules to import before the id is looked up, in worker processes too: those that register
            environments.
        max_episode_steps: Truncate episodes after this many steps of the environment, in the place of the limit that it
            is registered with.
        action_repeat: Steps of the environment for each action: rewards are added up, and the end of an episode ends
            the repetition (`sync` and `async` only; Atari games have `env.atari.frame_skip`).
        learned_action_repeat: Let the policy choose for each action how often it is taken, up to this many times:
            actions become a `Dict` of `action` and `repeat`, rewards are added up, and what follows is discounted by γ
            for each time (`sync` and `async` only). `{"max": n, "gamma": γ}` discounts rewards within a step by γ too,
            in training. None takes each action once.
        reward_scale: Factor of the rewards that are learned from; evaluation has raw ones.
        reward_clip: What bounds them after that: `abs_one` to [-1, 1], a number c to [-c, c], `soft_asymmetric` with
            5 · tanh(r / 5), times 0.3 where r is negative.
        frame_stack: Observations are those of this many steps, oldest first, an episode beginning with copies of its
            first: along a new first dimension, images along their channels. None does not stack.
        flatten_observations: Make one vector of each observation, nested or not; what is discrete becomes one-hot.
        previous_action: Add the previous action to observations, which become a `Dict` (`observation`,
            `previous_action`) where they are none; what is discrete is one-hot; zeros where an episode begins.
        previous_reward: Add the previous reward, as it is learned from, in evaluation too.
        action_mask: Where the environment says which actions are valid: `info.<key>`, `observation.<path>` or
            `method.<name>` (without arguments); None: all are. Masks become a part of the observation, which the policy
            draws its actions by, in training and evaluation. See the guide for their shapes.
    """

    kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: list[str | ClassSpec] | None = None
    training_wrappers: list[str | ClassSpec] | None = None
    atari: AtariPreprocessing = AtariPreprocessing()
    step_timeout: float | None = None
    on_failure: OnEnvFailure = "raise"
    imports: Sequence[str] = ()
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

    def check(self, backend: Backend) -> None:
        """Raise where an option is out of range or does not go with another one.

        Args:
            backend: Of the environments.

        Raises:
            ConfigurationError: Names the option as `env.frame_stack`.
        """
        check_keywords("env.kwargs", self.kwargs)
        check_names("env.imports", self.imports, "a list of modules")
        self.atari.check()
        self._check_backend(backend)
        for name in ("max_episode_steps", "frame_stack"):
            if getattr(self, name) is not None:
                check_positive_int(f"env.{name}", getattr(self, name))
        given = self.max_episode_steps is not None and "max_episode_steps" in self.kwargs
        check(not given, "env.max_episode_steps", self.max_episode_steps, "None beside that in env.kwargs")
        for name in ("flatten_observations", "previous_action", "previous_reward"):
            check_bool(f"env.{name}", getattr(self, name))
        check_reward_options(self.reward_scale, self.reward_clip, "env.")
        if self.action_mask is not None:
            self._check_mask()

    def _check_backend(self, backend: Backend) -> None:
        """Check the options that need single environments or processes."""
        if self.step_timeout is not None:
            check(backend == "async", "env.step_timeout", self.step_timeout, "None unless backend is 'async'")
            # The system call that waits counts milliseconds in 32 bits.
            check_number("env.step_timeout", self.step_timeout, above=0, at_most=1e6)
        known = is_one_of(self.on_failure, get_args(OnEnvFailure))
        check(known, "env.on_failure", self.on_failure, "raise or restart")
        check_positive_int("env.action_repeat", self.action_repeat)
        learned_repeat(self.learned_action_repeat)
        for name, off, cannot in (
            ("on_failure", "raise", "replaced"),
            ("action_repeat", 1, "stepped"),
            ("learned_action_repeat", None, "stepped"),
        ):
            value = getattr(self, name)
            expected = f"{off!r} with backend={backend!r}, whose environments cannot be {cannot} one by one"
            check(value == off or backend in ("sync", "async"), f"env.{name}", value, expected)

    def _check_mask(self) -> None:
        """Check the source of masks, which are found after frames are stacked and observations are flat."""
        check_source(self.action_mask)
        if not str(self.action_mask).startswith("observation."):
            return
        for name, off in (("frame_stack", None), ("flatten_observations", False)):
            value = getattr(self, name)
            expected = f"{off} with env.action_mask={self.action_mask!r}: only masks from info.<key> and method.<name> "
            check(value == off, f"env.{name}", value, f"{expected}go with it")


if TYPE_CHECKING:
    EnvOptions = EnvConfig | Mapping[str, Any]
else:  # the command line knows the fields of the class alone
    EnvOptions = EnvConfig


@dataclass(frozen=True)
class EnvironmentSpec:
    """Everything needed to make an environment.

    Args:
        env_id: Gymnasium id (`module:id` imports `module` first), or EnvPool task.
        env: Its options.
        backend: `sync` (in this process), `async` (a worker process each), `native` (the environment's own
            vectorised version), `torch` (one that speaks tensors) or `envpool`.
        evaluation: Leave the environment's own rewards and episodes alone, and `env.training_wrappers` out.
        filmed: Put a `Camera` around each environment (`sync` only).

    Raises:
        ConfigurationError: An option is out of range, does not go with another one, or names what is not trusted.
    """

    env_id: str
    env: EnvConfig = EnvConfig()
    backend: Backend = "sync"
    evaluation: bool = False
    filmed: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without making an environment."""
        choices = get_args(Backend)
        check(is_one_of(self.backend, choices), "backend", self.backend, f"one of {', '.join(choices)}")
        self.env.check(self.backend)
        applied = self.wrappers
        if is_loading():
            self._check_trusted(applied)

    def _check_trusted(self, applied: Sequence[ClassSpec]) -> None:
        """Check what loaded data names: environments are made later, when nobody knows where the spec came from."""
        for name in self.env.imports:
            check_module("env.imports", name, name)
        if module := self.env_id.rpartition(":")[0]:
            check_module("env_id", self.env_id, module)
        for wrapper in applied:
            import_class("env.wrappers", wrapper["class_path"], WRAPPERS)

    @property
    def wrappers(self) -> list[ClassSpec]:
        """The user's wrappers, in the order in which they are applied: those of training alone come last."""
        always = to_class_specs("env.wrappers", self.env.wrappers)
        return always if self.evaluation else always + self.training_wrappers

    @property
    def training_wrappers(self) -> list[ClassSpec]:
        """Those of the user's wrappers that evaluation leaves out."""
        return to_class_specs("env.training_wrappers", self.env.training_wrappers)

    @property
    def reward_transform(self) -> RewardTransform | None:
        """What becomes of rewards in training; None if nothing does."""
        return make_reward_transform(self.env.reward_scale, self.env.reward_clip)

    @property
    def changes_observations(self) -> bool:
        """Whether vector wrappers change what single environments observe."""
        return any(getattr(self.env, name) for name in _OF_OBSERVATIONS)

    def wrap(self, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        """Apply what belongs into the process of one environment: options of rewards, and the reading of masks.

        Args:
            env: The environment, with the user's own wrappers.
        """
        if self.reward_transform is not None and not self.evaluation:
            env = wrappers.TransformReward(env, self.reward_transform)
        return env if self.env.action_mask is None else ReadMasks(env, self.env.action_mask)

    def wrap_vector(
        self, env: VectorEnv[Any, Any, Any], clips: RewardTransform | None = None
    ) -> VectorEnv[Any, Any, Any]:
        """Apply the options of observations to the environments of any backend.

        What observations say of the previous reward is the same in evaluation as in training.

        Args:
            env: The environments.
            clips: What else becomes of rewards in training and not in evaluation.
        """
        given = self.env
        if given.frame_stack is not None:
            env = FrameStack(env, given.frame_stack)
        if given.flatten_observations:
            env = FlatObservations(env)
        if given.previous_action or given.previous_reward:
            # Learned repeats say themselves what clipped rewards would have earned.
            clips = clips if given.learned_action_repeat is None else None
            shown = (self.reward_transform or clips) if self.evaluation else None
            env = PreviousStep(env, given.previous_action, given.previous_reward, shown)
        return env if given.action_mask is None else MaskedActions(env, given.action_mask)

    def wrap_rewards(self, env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
        """Apply the options of rewards to environments that come vectorised."""
        transform = None if self.evaluation else self.reward_transform
        return env if transform is None else vector_wrappers.TransformReward(env, transform)

    def wrap_tensors(self, env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
        """Apply what can be applied to training environments that speak tensors: the options of rewards.

        Raises:
            ConfigurationError: Another option is set.
        """
        expected = "its default for environments that speak tensors, which can do it themselves"
        for name in _OF_OBSERVATIONS:
            value = getattr(self.env, name)
            check(not value, f"env.{name}", value, expected)
        return self.wrap_rewards(env)

    def for_evaluation(self) -> EnvironmentSpec:
        """Return the spec of the evaluation environments."""
        return replace(self, evaluation=True)

    def for_filming(self, env_kwargs: dict[str, Any] | None = None) -> EnvironmentSpec:
        """Return the spec of the same environments one by one in this process, each with a camera.

        Args:
            env_kwargs: More arguments of the constructor: the size of the picture, a camera of the simulation.

        Raises:
            ConfigurationError: The backend has no single environments.
        """
        expected = "sync, async, or native where the id has single environments too; EnvPool and tensors cannot render"
        check(self.backend in ("sync", "async", "native"), "backend", self.backend, expected)
        kwargs = self.env.kwargs | (env_kwargs or {}) | {"render_mode": "rgb_array"}
        # One that failed and was replaced would have lost the frames before.
        env = replace(self.env, kwargs=kwargs, step_timeout=None, on_failure="raise")
        return replace(self, env=env, backend="sync", filmed=True)

    def atari_options(self, is_game: bool) -> AtariPreprocessing | None:
        """Return the preprocessing to apply, None where the environment is no Atari game.

        Raises:
            ConfigurationError: Options were given for an environment that is none; or frames would be stacked, actions
                repeated or rewards clipped twice.
        """
        env, atari = self.env, self.env.atari
        if not is_game:
            expected = f"its default, since {self.env_id} is no Atari game with frames"
            check(atari == AtariPreprocessing(), "env.atari", atari, expected)
            return None
        expected = "None for Atari games, which have env.atari.frame_stack"
        check(env.frame_stack is None, "env.frame_stack", env.frame_stack, expected)
        expected = "1 for Atari games, which have env.atari.frame_skip"
        check(env.action_repeat == 1, "env.action_repeat", env.action_repeat, expected)
        if atari.clip_rewards:
            expected = "other values with Atari games only beside env.atari.clip_rewards=False"
            check(env.reward_scale == 1, "env.reward_scale", env.reward_scale, f"1; {expected}")
            check(env.reward_clip is None, "env.reward_clip", env.reward_clip, f"None; {expected}")
        return atari
