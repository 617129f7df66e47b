"""Records frames of episodes, also on machines without a display."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable
from traceback import extract_tb
from typing import Any, Protocol

import gymnasium
import numpy as np

from lightning_rl.environments.contract import summary
from lightning_rl.validation import ConfigurationError, check, how_to_install

_MAX_FPS = 30
_ATARI_FPS = 60
_MUJOCO_HINT = (
    "MUJOCO_GL=egl (the driver of a GPU, or Mesa: apt install libegl1 libgl1-mesa-dri) or MUJOCO_GL=osmesa "
    "(apt install libosmesa6), set before the program starts"
)


class FilmMaker(Protocol):
    """Opens and finishes the video of each episode, by its number."""

    def open(self, number: int, fps: float) -> Any:  # an object with `append(frame)` and `discard()`
        """Return a video, with methods `append(frame)` and `discard()`."""

    def finished(self, number: int, video: Any) -> None:  # the result of `open`
        """Take the video of a finished episode."""


class Camera(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Records chosen episodes of an environment made with `render_mode="rgb_array"`, at about 30 frames per second.

    `steps_per_second` are in simulated time; a faster environment skips frames.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], steps_per_second: float) -> None:
        super().__init__(env)
        self.stride = max(1, round(steps_per_second / _MAX_FPS))
        self.fps = steps_per_second / self.stride
        self._maker: FilmMaker | None = None
        self._numbers: deque[int] = deque()
        self._film: Any = None
        self._step = 0

    def film(self, maker: FilmMaker, numbers: Iterable[int]) -> None:
        """Record the next episodes, which have these numbers."""
        self._maker, self._numbers = maker, deque(numbers)

    def check_renders(self) -> None:
        """Render one frame; raise a `ConfigurationError` that says what to install or to set if this fails."""
        spec, modes = self.unwrapped.spec, self.env.metadata.get("render_modes") or []
        assert spec is not None
        if "rgb_array" not in modes:
            raise ConfigurationError(
                f"{spec.id} cannot be filmed: expected an environment with the render mode 'rgb_array', it has {modes}"
            )
        try:
            self.env.reset(seed=0)
            take_picture(self.env)
        except ConfigurationError:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, gymnasium.error.DependencyNotInstalled | ImportError) and "pygame" in str(error):
                raise ConfigurationError(
                    f"{spec.id} is drawn by pygame, which is not installed: {how_to_install('video')}"
                ) from error
            what = f"{spec.id} cannot be drawn on this machine ({summary(error)})"
            if "mujoco" in f"{spec.entry_point} {extract_tb(error.__traceback__)}".lower():
                what += f" with MUJOCO_GL={os.environ.get('MUJOCO_GL')!r}: expected {_MUJOCO_HINT}"
            raise ConfigurationError(what) from error

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:  # the arguments of `Env.reset`
        result = self.env.reset(**kwargs)
        self._discard()
        if self._maker is not None and self._numbers:
            self._film, self._step = self._maker.open(self._numbers[0], self.fps), 0
            self._film.append(take_picture(self.env))
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
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
        self._discard()
        super().close()

    def _discard(self) -> None:
        if self._film is not None:
            self._film.discard()
        self._film = None


def steps_per_second(env: gymnasium.Env[Any, Any], is_atari: bool, frames_per_step: int) -> float:
    """Return the number of steps per second of simulated time, which is 30 unless the environment defines it."""
    frames = _ATARI_FPS if is_atari else env.metadata.get("render_fps") or _MAX_FPS
    return float(frames) / frames_per_step


def prepare_rendering() -> None:
    """Let MuJoCo and pygame render without a display if there is none; settings of the user take precedence."""
    has_display = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if sys.platform == "linux" and not has_display:
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def take_picture(env: gymnasium.Env[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the current frame of an environment, `uint8` `[height, width, 3]`."""
    frame = np.asarray(env.render())
    is_picture = frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8 and frame.size > 0
    found = f"{frame.dtype} {list(frame.shape)}"
    check(is_picture, f"{type(env.unwrapped).__name__}.render()", found, "a picture, uint8 [height, width, 3]")
    return frame
