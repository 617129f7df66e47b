"""Environments that show what happens in them, also on machines without a display."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from lightning_rl.environments.contract import is_failure
from lightning_rl.validation import ConfigurationError, how_to_install

_MAX_FPS = 30
_ATARI_FPS = 60
_MUJOCO_HINT = (
    "MUJOCO_GL=egl (the driver of a GPU, or Mesa: apt install libegl1 libgl1-mesa-dri) or MUJOCO_GL=osmesa "
    "(apt install libosmesa6), set before the program starts"
)


class Film(Protocol):
    """Takes the frames of one episode."""

    def append(self, frame: np.ndarray[Any, Any]) -> None:
        """Take in the next frame."""

    def discard(self) -> None:
        """Forget all of them."""


class FilmMaker(Protocol):
    """Begins and finishes the film of each episode, by its number."""

    def open(self, number: int, fps: float) -> Any:  # noqa: ANN401 - a Film, whatever else it is
        """Return what takes the frames."""

    def finished(self, number: int, video: Any) -> None:  # noqa: ANN401 - what `open` returned
        """The episode is over."""


class Camera(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Film the episodes that it is told to, from the first observation to the last.

    Where more than about 30 steps are a second, some of the frames in between are left out.

    Args:
        env: Made with `render_mode="rgb_array"`.
        steps_per_second: Of the simulation, at the speed that it is meant to be seen at.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], steps_per_second: float) -> None:
        super().__init__(env)
        self.stride = max(1, round(steps_per_second / _MAX_FPS))
        self.fps = steps_per_second / self.stride
        self._maker: FilmMaker | None = None
        self._numbers: deque[int] = deque()
        self._film: Any = None
        self._step = 0

    def begin(self, maker: FilmMaker, numbers: Iterable[int]) -> None:
        """Film the next episodes, which have these numbers, and none after them."""
        self._maker, self._numbers = maker, deque(numbers)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401 - those of `Env.reset`
        """Begin an episode, and its film."""
        result = self.env.reset(**kwargs)
        self._discard()
        if self._maker is not None and self._numbers:
            self._film, self._step = self._maker.open(self._numbers[0], self.fps), 0
            self._film.append(take_picture(self.env))
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Step; the last frame of an episode is in its film in any case."""
        result = self.env.step(action)
        if self._film is not None:
            self._step += 1
            over = bool(result[2] or result[3])
            if over or self._step % self.stride == 0:
                self._film.append(take_picture(self.env))
            if over:
                assert self._maker is not None
                film, self._film = self._film, None
                self._maker.finished(self._numbers.popleft(), film)
        return result

    def close(self) -> None:
        """Close the environment; a film that has no end is not kept."""
        self._discard()
        super().close()

    def _discard(self) -> None:
        if self._film is not None:
            self._film.discard()
        self._film = None


def cameras(env: Any) -> Iterator[Camera]:  # noqa: ANN401 - a SyncVectorEnv and what is around it
    """Yield the camera of each environment."""
    for single in env.unwrapped.envs:
        while not isinstance(single, Camera):
            single = single.env
        yield single


def steps_per_second(env: gymnasium.Env[Any, Any], is_atari: bool, frames_per_step: int) -> float:
    """Return how many steps of the policy are a second of the simulation; 30 where nobody says so."""
    frames = _ATARI_FPS if is_atari else env.metadata.get("render_fps") or _MAX_FPS
    return float(frames) / frames_per_step


def prepare_rendering() -> None:
    """Have MuJoCo and pygame draw without a display where there is none, unless the user has chosen a way to draw."""
    shown = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if sys.platform == "linux" and not shown:
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def check_renders(spec: EnvSpec, env: gymnasium.Env[Any, Any]) -> None:
    """Take one picture.

    Raises:
        ConfigurationError: The environment has none, or this machine cannot draw it; says what is missing.
    """
    modes = env.metadata.get("render_modes") or []
    if "rgb_array" not in modes:
        raise ConfigurationError(
            f"{spec.id} cannot be filmed: expected an environment with the render mode 'rgb_array', it has {modes}"
        )
    with explained_rendering(spec):
        env.reset(seed=0)
        take_picture(env)


@contextlib.contextmanager
def explained_rendering(spec: EnvSpec) -> Iterator[None]:
    """Turn what the making of a picture raises into an error that says what to install or to set."""
    try:
        yield
    except ConfigurationError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        if isinstance(error, gymnasium.error.DependencyNotInstalled | ImportError) and "pygame" in str(error):
            raise ConfigurationError(
                f"{spec.id} is drawn by pygame, which is not installed: {how_to_install('video')}"
            ) from error
        what = f"{spec.id} cannot be drawn on this machine ({type(error).__name__}: {error})"
        if "mujoco" in str(spec.entry_point).lower():
            chosen = os.environ.get("MUJOCO_GL")
            raise ConfigurationError(f"{what} with MUJOCO_GL={chosen!r}: expected {_MUJOCO_HINT}") from error
        raise ConfigurationError(what) from error


def take_picture(env: gymnasium.Env[Any, Any]) -> np.ndarray[Any, Any]:
    """Return what the environment looks like now, `[height, width, 3]` of `uint8`."""
    frame = np.asarray(env.render())
    if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8 or not frame.size:
        raise ConfigurationError(
            f"{type(env.unwrapped).__name__}.render() returned {frame.dtype} {list(frame.shape)}: expected a picture, "
            "uint8 [height, width, 3]"
        )
    return frame
