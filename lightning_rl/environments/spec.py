"""What environments to make, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import gymnasium
from gymnasium.vector import VectorWrapper

from lightning_rl.environments.atari import AtariPreprocessing
from lightning_rl.environments.options import WrapperOptions
from lightning_rl.validation import (
    ClassSpec,
    check,
    check_keywords,
    check_module,
    check_number,
    import_class,
    is_loading,
    is_one_of,
)

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
