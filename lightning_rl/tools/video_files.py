"""Video files, and small GIFs for loggers."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rl.validation import ConfigurationError, how_to_install

Frame = np.ndarray[Any, Any]


class BoundedGif:
    """A GIF of at most `max_frames`: long episodes are shown with fewer frames per second, in the same time.

    Frames wider or higher than `max_side` pixels are subsampled. `fps` is the rate of appended frames.
    """

    def __init__(self, fps: float, max_frames: int = 200, max_side: int = 240) -> None:
        self.max_frames = max_frames
        self.max_side = max_side
        self.frames: list[Frame] = []
        self._fps = fps
        self._stride = 1
        self._seen = 0

    @property
    def fps(self) -> float:
        return self._fps / self._stride

    def append(self, frame: Frame) -> None:
        """Add a frame, `[height, width, 3]` of `uint8`."""
        if self._seen % self._stride == 0:
            every = -(-max(frame.shape[:2]) // self.max_side)
            self.frames.append(np.array(frame[::every, ::every]))
        self._seen += 1
        if len(self.frames) > self.max_frames:
            self.frames, self._stride = self.frames[::2], self._stride * 2

    def encode(self) -> bytes:
        """Return the content of the file, an endless loop."""
        import imageio.v3

        # In milliseconds. GIF counts hundredths of a second, and players ignore a duration of one.
        duration = max(20.0, 1000.0 / self.fps)
        content = imageio.v3.imwrite("<bytes>", np.stack(self.frames), extension=".gif", duration=duration, loop=0)
        return bytes(content)


class VideoFile:
    """A video that appears when complete: MP4 with imageio's ffmpeg, otherwise GIF; `path` gets the suffix."""

    def __init__(self, path: Path, fps: float) -> None:
        self.preview = BoundedGif(fps)
        self.path = path.with_name(path.name + video_suffix())
        self.fps = fps
        path.parent.mkdir(parents=True, exist_ok=True)
        # With the same suffix, which selects the format.
        self._unfinished = path.with_name(f".{self.path.name}.unfinished{self.path.suffix}")
        self._writer: Any = None
        self._gif = BoundedGif(fps, max_frames=500, max_side=480) if self.path.suffix == ".gif" else None

    def append(self, frame: Frame) -> None:
        self.preview.append(frame)
        if self._gif is not None:
            self._gif.append(frame)
            return
        if self._writer is None:
            import imageio

            # A block size of 1: imageio would stretch frames to multiples of 16.
            self._writer = imageio.get_writer(self._unfinished, fps=self.fps, macro_block_size=1, codec="libx264")
        # H.264 needs even numbers of rows and columns.
        rows, columns = frame.shape[0] % 2, frame.shape[1] % 2
        self._writer.append_data(np.pad(frame, ((0, rows), (0, columns), (0, 0)), mode="edge"))

    def close(self) -> None:
        if self._gif is not None:
            self._unfinished.write_bytes(self._gif.encode())
        else:
            self._writer.close()
            if not self._unfinished.exists():  # imageio does not raise
                raise OSError(f"ffmpeg could not write {self.path}")
        self._unfinished.replace(self.path)

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._unfinished.unlink(missing_ok=True)


@dataclass
class Films:
    """Writes a video file for each episode; `name` is a format of the episode's number."""

    folder: Path
    name: str = "episode={}"
    on_finished: Callable[[int, VideoFile], None] | None = None

    def open(self, number: int, fps: float) -> VideoFile:
        return VideoFile(self.folder / self.name.format(number), fps)

    def finished(self, number: int, video: VideoFile) -> None:
        video.close()
        if self.on_finished is not None:
            self.on_finished(number, video)


def video_suffix() -> str:
    """Return `.mp4`, or `.gif` without ffmpeg."""
    try:
        importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
    except (ImportError, RuntimeError):  # no package, or no program
        return ".gif"
    return ".mp4"


def check_imageio() -> None:
    """Raise a `ConfigurationError` if imageio is not installed."""
    if importlib.util.find_spec("imageio") is None:
        raise ConfigurationError(f"video needs imageio, which is not installed: {how_to_install('video')}")
