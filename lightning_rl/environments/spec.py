"""Description of the environments of a run: id, backend and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

import gymnasium
from gymnasium.vector import VectorEnv, VectorWrapper

from lightning_rl.environments.atari import AtariPreprocessing
from lightning_rl.environments.registry import parallel_module
from lightning_rl.environments.wrappers.action_mask import MaskedActions, check_source
from lightning_rl.environments.wrappers.action_repeat import learned_repeat
from lightning_rl.environments.wrappers.history import FlatObservations, FrameStack, History, PreviousStep
from lightning_rl.environments.wrappers.transforms import (
    RewardClip,
    RewardTransform,
    check_reward_options,
    make_reward_transform,
)
from lightning_rl.masks import find_masks
from lightning_rl.options import OrClass, OrDict
from lightning_rl.validation import (
    ClassSpec,
    PositiveInt,
    Range,
    check,
    check_module,
    import_class,
    is_loading,
    is_one_of,
    to_class_specs,
)

WRAPPERS = (gymnasium.Wrapper, VectorWrapper)
"""Base classes of wrappers."""
Backend = Literal["sync", "async", "native", "torch", "envpool"]
OnEnvFailure = Literal["raise", "restart"]
_OF_OBSERVATIONS = ("frame_stack", "flatten_observations", "previous_action", "previous_reward", "action_mask")


@dataclass(frozen=True)
class EnvConfig:
    """Options of the environments.

    They are applied in this order: time limit, repeated actions, wrappers; then learned repeats, rewards, stacked
    frames, flat observations, previous action and reward, action masks. With `sync` and `async`, wrappers of vector
    environments come after learned repeats.

    Args:
        kwargs: Arguments of the environment's constructor.
        wrappers: `gymnasium.Wrapper` classes (`gymnasium.vector.VectorWrapper` for `native`, `torch` and `envpool`) as
            class paths or `{"class_path": ..., "init_args": ...}`, innermost first.
        training_wrappers: Wrappers around `wrappers` for training only, such as wrappers that change rewards.
        atari: Options of Atari preprocessing; other environments reject values other than the default.
        step_timeout: Maximum seconds of a worker process for one step or reset (`async` only). None is 120 s.
        on_failure: `raise` ends the run when an environment fails: it raises, returns NaN, infinity, a wrong shape or a
            reward that is not a number, or its worker process dies or hangs. `restart` (`sync` and `async` only)
            replaces the environment and begins its next episode: the interrupted episode counts as truncated, and the
            failed step is not learned from. Four failures without a completed step in between end the run.
        imports: Modules that register environments, imported also in worker processes.
        max_episode_steps: Truncate episodes after this many steps of the environment; replaces the registered limit.
        action_repeat: Number of simulator steps per action; a step returns the sum of their rewards (`sync` and
            `async` only; Atari games have `env.atari.frame_skip`).
        learned_action_repeat: Maximum number of repeats that the policy chooses for each action (`sync` and `async`
            only). Actions become a `Dict` of `action` and `repeat`, a step returns the sum of rewards, and the next
            value is discounted by the algorithm's γ to the power of the repeats. `{"max": n, "gamma": γ}` also
            discounts the rewards within a training step; `{"max": n, "discount": "per_step"}` discounts the next value
            by γ once, for every number of repeats. None disables repeats.
        frame_count: Which frames of repeated actions the clock counts: `simulated` counts the frames that really ran;
            `nominal` counts all repeats of every action, also those after the end of an episode, which never ran.
        reward_scale: Multiplier of training rewards.
        reward_clip: Clipping of training rewards after scaling: `abs_one` to [-1, 1], a number c to [-c, c];
            `soft_asymmetric` maps r to 5 · tanh(r / 5), times 0.3 for negative r. None does not clip.
        frame_stack: Number of steps in an observation, oldest first, along a new first dimension or the channels of
            images; an episode begins with copies of its first observation. None does not stack.
        flatten_observations: Flatten each observation to one vector; discrete parts become one-hot.
        previous_action: Add the previous action to observations as `previous_action`; zeros at the start of an
            episode. Discrete actions are one-hot. Other observations than a `Dict` become its entry `observation`.
        previous_reward: Add the previous reward to observations in the same way, as `previous_reward`; scaled and
            clipped as in training, also in evaluation.
        action_mask: Source of the masks of valid actions: `info.<key>`, `observation.<path>` or `method.<name>`
            (called without arguments). Masks become part of the observation. None allows all actions.
    """

    kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: Sequence[OrClass[str | ClassSpec]] | None = None
    training_wrappers: Sequence[OrClass[str | ClassSpec]] | None = None
    atari: AtariPreprocessing = AtariPreprocessing()
    # The system call `poll` takes milliseconds in 32 bits.
    step_timeout: Annotated[float, Range(above=0, at_most=1e6)] | None = None
    on_failure: OnEnvFailure = "raise"
    imports: Sequence[str] = ()
    max_episode_steps: PositiveInt | None = None
    action_repeat: PositiveInt = 1
    learned_action_repeat: int | dict[str, Any] | None = None
    frame_count: Literal["simulated", "nominal"] = "simulated"
    reward_scale: float = 1.0
    reward_clip: RewardClip | None = None
    frame_stack: PositiveInt | None = None
    flatten_observations: bool = False
    previous_action: bool = False
    previous_reward: bool = False
    action_mask: str | None = None

    def check(self, backend: Backend) -> None:
        """Raise a `ConfigurationError` that names the option, as `env.frame_stack`, if one is invalid."""
        if self.step_timeout is not None:
            check(backend == "async", "env.step_timeout", self.step_timeout, "None unless backend is 'async'")
        repeats = learned_repeat(self.learned_action_repeat) is not None or self.action_repeat > 1
        expected = "simulated, or nominal with env.action_repeat or env.learned_action_repeat"
        check(repeats or self.frame_count == "simulated", "env.frame_count", self.frame_count, expected)
        for name, off, cannot in (
            ("on_failure", "raise", "replaced"),
            ("action_repeat", 1, "stepped"),
            ("learned_action_repeat", None, "stepped"),
        ):
            value = getattr(self, name)
            expected = f"{off!r} with backend={backend!r}, whose environments cannot be {cannot} one by one"
            check(value == off or backend in ("sync", "async"), f"env.{name}", value, expected)
        given = self.max_episode_steps is not None and "max_episode_steps" in self.kwargs
        check(not given, "env.max_episode_steps", self.max_episode_steps, "None, since there is a limit in env.kwargs")
        check_reward_options(self.reward_scale, self.reward_clip, "env.")
        if self.action_mask is None:
            return
        check_source(self.action_mask)
        in_observations = self.action_mask.startswith("observation.")
        for name, off in (("frame_stack", None), ("flatten_observations", False)):
            value = getattr(self, name)
            expected = f"{off} with env.action_mask={self.action_mask!r}: only masks from info.<key> and method.<name> "
            check(value == off or not in_observations, f"env.{name}", value, f"{expected}can be combined with it")


EnvOptions = OrDict[EnvConfig]


@dataclass(frozen=True)
class EnvironmentSpec:
    """The complete description of the environments of a run; an invalid option raises a `ConfigurationError`.

    Args:
        env_id: Gymnasium id (`module:id` imports `module` first), or EnvPool task.
        env: Options of the environments.
        backend: See `RolloutDataModule`.
        evaluation: Use raw rewards and whole episodes, without `env.training_wrappers`.
        filmed: Add a `Camera` to each environment (`sync` only).
    """

    env_id: str
    env: EnvConfig = EnvConfig()
    backend: Backend = "sync"
    evaluation: bool = False
    filmed: bool = False

    def __post_init__(self) -> None:
        """Check all options that can be checked without making an environment."""
        choices = get_args(Backend)
        check(is_one_of(self.backend, choices), "backend", self.backend, f"one of {', '.join(choices)}")
        self.env.check(self.backend)
        module, _, name = self.env_id.rpartition(":")
        if parallel := parallel_module(name):
            given = self.env.kwargs.get("module")
            check(given is None, "env.kwargs.module", given, f"None, since {self.env_id} names the module")
        if is_loading():  # now, since the environments are made later, outside of `loading`
            for name in self.env.imports:
                check_module("env.imports", name, name)
            for name in filter(None, (module, parallel)):
                check_module("env_id", self.env_id, name)
        for name in ("wrappers", "training_wrappers"):
            for wrapper in to_class_specs(f"env.{name}", getattr(self.env, name)):
                import_class(f"env.{name}", wrapper["class_path"], WRAPPERS)

    @property
    def wrappers(self) -> list[ClassSpec]:
        """The user's wrappers, innermost first; `env.training_wrappers` are the outermost."""
        always = to_class_specs("env.wrappers", self.env.wrappers)
        return always if self.evaluation else always + self.training_wrappers

    @property
    def training_wrappers(self) -> list[ClassSpec]:
        return to_class_specs("env.training_wrappers", self.env.training_wrappers)

    @property
    def reward_transform(self) -> RewardTransform | None:
        """The function that scales and clips training rewards; None without such options."""
        return make_reward_transform(self.env.reward_scale, self.env.reward_clip)

    def histories(self, env: VectorEnv[Any, Any, Any], clips: RewardTransform | None = None) -> list[History]:
        """Return what the options of observations add to the observations of environments of any backend.

        Evaluation rewards are raw; `clips`, by which Atari preprocessing clips training rewards, then only clips the
        `previous_reward` in observations.
        """
        given, num_envs = self.env, env.num_envs
        made: list[History] = []
        space = env.single_observation_space
        if given.frame_stack is not None:
            made.append(FrameStack(space, num_envs, given.frame_stack))
            space = made[-1].space
        if given.flatten_observations:
            masks = find_masks(space)
            expected = f"False, since observations have action masks ({masks}); masks may be in info instead"
            check(masks is None, "env.flatten_observations", True, expected)
            made.append(FlatObservations(space))
            space = made[-1].space
        if given.previous_action or given.previous_reward:
            # Learned repeats clip the rewards themselves, before they sum them.
            clips = clips if given.learned_action_repeat is None else None
            shown = (self.reward_transform or clips) if self.evaluation else None
            options = given.previous_action, given.previous_reward, shown
            made.append(PreviousStep(space, env.single_action_space, num_envs, *options))
            space = made[-1].space
        if given.action_mask is not None:
            made.append(MaskedActions(space, env, given.action_mask))
        return made

    def check_tensors(self) -> None:
        """Raise a `ConfigurationError` if an option is set that tensor environments do not have."""
        expected = "its default with backend='torch', whose environments must transform observations themselves"
        for name in _OF_OBSERVATIONS:
            value = getattr(self.env, name)
            check(not value, f"env.{name}", value, expected)

    def for_evaluation(self) -> EnvironmentSpec:
        return replace(self, evaluation=True)

    def for_filming(self, env_kwargs: dict[str, Any] | None = None) -> EnvironmentSpec:
        """Return the same environments with cameras, in this process, with additional `env_kwargs` for the constructor.

        The backends `envpool` and `torch`, which cannot be rendered, raise a `ConfigurationError`.
        """
        expected = "sync, async, or native with an id that has single environments too; others cannot be rendered"
        check(self.backend in ("sync", "async", "native"), "backend", self.backend, expected)
        kwargs = self.env.kwargs | (env_kwargs or {}) | {"render_mode": "rgb_array"}
        # A replaced environment would lose its frames.
        env = replace(self.env, kwargs=kwargs, step_timeout=None, on_failure="raise")
        return replace(self, env=env, backend="sync", filmed=True)

    def atari_options(self, is_game: bool) -> AtariPreprocessing | None:
        """Return the preprocessing of an Atari game, None for other environments.

        Options of `env.atari` for another environment, or of `env` that repeat the preprocessing, raise a
        `ConfigurationError`.
        """
        env, atari = self.env, self.env.atari
        if not is_game:
            expected = f"its default, since {self.env_id} is no Atari game with frames"
            check(atari == AtariPreprocessing(), "env.atari", atari, expected)
            return None
        for name, own in (("frameskip", "frame_skip"), ("frame_skip",) * 2, ("repeat_action_probability",) * 2):
            check(name not in env.kwargs, f"env.kwargs.{name}", env.kwargs.get(name), f"env.atari.{own} instead")
        expected = "None for Atari games, which have env.atari.frame_stack"
        check(env.frame_stack is None, "env.frame_stack", env.frame_stack, expected)
        expected = "1 for Atari games, which have env.atari.frame_skip"
        check(env.action_repeat == 1, "env.action_repeat", env.action_repeat, expected)
        if atari.clip_rewards:
            expected = "other values with Atari games only beside env.atari.clip_rewards=False"
            check(env.reward_scale == 1, "env.reward_scale", env.reward_scale, f"1; {expected}")
            check(env.reward_clip is None, "env.reward_clip", env.reward_clip, f"None; {expected}")
        return atari
