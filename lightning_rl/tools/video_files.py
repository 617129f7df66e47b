"""Video files, written frame by frame, and the small moving pictures that loggers show."""

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


class MovingPicture:
    """A GIF of bounded size, whatever the number of frames: the more there are, the more of them are left out.

    It lasts as long as all frames together would.

    Args:
        fps: Frames that come in a second.
        max_frames: How many are kept at the most.
        max_side: Of width and height in pixels; larger frames are thinned out.
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
        """Frames shown in a second."""
        return self._fps / self._stride

    def append(self, frame: Frame) -> None:
        """Take in the next frame, `[height, width, 3]` of `uint8`."""
        if self._seen % self._stride == 0:
            every = -(-max(frame.shape[:2]) // self.max_side)
            self.frames.append(np.array(frame[::every, ::every]))
        self._seen += 1
        if len(self.frames) > self.max_frames:
            self.frames, self._stride = self.frames[::2], self._stride * 2

    def encode(self) -> bytes:
        """Return it as the content of a GIF file, which begins again when it ends."""
        import imageio.v3

        # GIF counts hundredths of a second, and players take one of them for a mistake.
        duration = max(20.0, 1000.0 / self.fps)
        content = imageio.v3.imwrite("<bytes>", np.stack(self.frames), extension=".gif", duration=duration, loop=0)
        return bytes(content)


class VideoFile:
    """One video: MP4 where imageio's ffmpeg is installed, otherwise GIF.

    The file is there when it is whole.

    Args:
        path: Of the file, without the suffix.
        fps: Frames shown in a second.
    """

    def __init__(self, path: Path, fps: float) -> None:
        self.preview = MovingPicture(fps)
        self.path = path.with_name(path.name + video_suffix())
        self.fps = fps
        path.parent.mkdir(parents=True, exist_ok=True)
        # A hidden file of the same kind: the suffix says which.
        self._unfinished = path.with_name(f".{self.path.name}.unfinished{self.path.suffix}")
        self._writer: Any = None
        self._gif = MovingPicture(fps, max_frames=500, max_side=480) if self.path.suffix == ".gif" else None

    def append(self, frame: Frame) -> None:
        """Take in the next frame, `[height, width, 3]` of `uint8`."""
        self.preview.append(frame)
        if self._gif is not None:
            self._gif.append(frame)
            return
        if self._writer is None:
            import imageio

            # Any size that H.264 can have, rather than a multiple of 16 that the picture would be stretched to.
            self._writer = imageio.get_writer(self._unfinished, fps=self.fps, macro_block_size=1, codec="libx264")
        self._writer.append_data(_even(frame))

    def close(self) -> None:
        """Finish the file."""
        if self._gif is not None:
            self._unfinished.write_bytes(self._gif.encode())
        else:
            self._writer.close()
            if not self._unfinished.exists():  # imageio does not say so
                raise OSError(f"ffmpeg could not write {self.path}")
        self._unfinished.replace(self.path)

    def discard(self) -> None:
        """Leave no file behind."""
        if self._writer is not None:
            self._writer.close()
        self._unfinished.unlink(missing_ok=True)


@dataclass
class Films:
    """What becomes of episodes that are filmed: a video file each.

    Attributes:
        folder: Where the files are.
        name: Of a file, without the suffix: a format of the number of the episode.
        tell: Called with each number and file as it is finished; None: nobody is told.
    """

    folder: Path
    name: str = "episode={}"
    tell: Callable[[int, VideoFile], None] | None = None

    def open(self, number: int, fps: float) -> VideoFile:
        """Begin the video of an episode."""
        return VideoFile(self.folder / self.name.format(number), fps)

    def finished(self, number: int, video: VideoFile) -> None:
        """Finish it."""
        video.close()
        if self.tell is not None:
            self.tell(number, video)


def video_suffix() -> str:
    """Return `.mp4`, or `.gif` where there is no ffmpeg."""
    try:
        importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
    except (ImportError, RuntimeError):  # the package, or the program that it brings or finds
        return ".gif"
    return ".mp4"


def check_imageio() -> None:
    """Refuse to go on without imageio.

    Raises:
        ConfigurationError: It is not installed.
    """
    if importlib.util.find_spec("imageio") is None:
        raise ConfigurationError(f"video needs imageio, which is not installed: {how_to_install('video')}")


def _even(frame: Frame) -> Frame:
    """Return a frame with an even number of rows and columns, as the colours of H.264 need it."""
    rows, columns = frame.shape[0] % 2, frame.shape[1] % 2
    return np.pad(frame, ((0, rows), (0, columns), (0, 0)), mode="edge") if rows or columns else frame
