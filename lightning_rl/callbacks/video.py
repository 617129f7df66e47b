"""Videos of the policy during training, and video files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]

from lightning_rl.callbacks.env_steps import EnvStepWriter
from lightning_rl.checkpointing.atomic import event_files
from lightning_rl.data.datamodule import RolloutDataModule
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.training.clock import env_steps_of
from lightning_rl.validation import check, check_installed, check_positive_int

Frame = np.ndarray[Any, Any]
_TAG = "video/episode={}"


class VideoRecorder(EnvStepWriter):
    """Film episodes after each interval of environment steps, and at the end.

    The first rank plays the same episodes each time, in separate environments with separate seeds; training is not
    affected, but waits. The files are `step=…-episode=….mp4`. TensorBoard logs an animation; W&B and MLflow the file.

    Args:
        every_n_env_steps: Environment steps of all ranks between videos.
        episodes: Number of episodes to film each time.
        dirpath: Folder; by default `videos` in the folder of the logger or, without one, of the Trainer.
        env_kwargs: Additional arguments for the constructor of the filmed environment, such as `width` and `height`.

    Raises:
        ConfigurationError: In `setup`: the environment cannot be filmed, or the folder cannot be written.
    """

    subfolder = "videos"

    def __init__(
        self,
        every_n_env_steps: int,
        episodes: int = 1,
        dirpath: str | Path | None = None,
        env_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_positive_int("episodes", episodes)
        super().__init__(every_n_env_steps, dirpath)
        self.episodes = episodes
        self.env_kwargs = env_kwargs

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            check_imageio()
            data_of(trainer).check_filmable(self.env_kwargs)
            self.check_folder(trainer)

    def write(self, folder: Path, trainer: Trainer, pl_module: LightningModule) -> None:
        step, data = env_steps_of(pl_module), data_of(trainer)

        def show(number: int, video: VideoFile) -> None:
            for logger in trainer.loggers:
                show_video(logger, _TAG.format(number), video, step)

        try:
            data.film(Films(folder, f"step={step}-episode={{}}", show), self.episodes, self.env_kwargs)
        except EnvironmentFailure as error:
            if data.spec.env.on_failure == "raise":
                raise
            rank_zero_warn(f"no video at {step} environment steps: {error}")


def data_of(trainer: Trainer) -> RolloutDataModule:
    """Return the data module, or raise a `ConfigurationError` if it is not a `RolloutDataModule`."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    check(isinstance(data, RolloutDataModule), "datamodule", type(data).__name__, "a RolloutDataModule")
    return data  # type: ignore[no-any-return]


def show_video(logger: Logger, tag: str, video: VideoFile, step: int) -> None:
    """Log a video, if the logger is a `TensorBoardLogger`, an `MLFlowLogger` or has `log_video` like `WandbLogger`."""
    if isinstance(logger, TensorBoardLogger):
        _add_to_tensorboard(logger, tag, video, step)
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_artifact(logger.run_id, str(video.path), artifact_path="videos")
    elif callable(log_video := getattr(logger, "log_video", None)):
        log_video(tag, [str(video.path)], step=step, format=[video.path.suffix.removeprefix(".")])


def _add_to_tensorboard(logger: TensorBoardLogger, tag: str, video: VideoFile, step: int) -> None:
    # `SummaryWriter.add_video` writes the same summary, but needs moviepy.
    from tensorboard.compat.proto.summary_pb2 import Summary

    height, width = video.preview.frames[0].shape[:2]
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=video.preview.encode())
    event_files(logger).add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


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
    """An MP4 video that appears when complete; `path` gets the suffix."""

    def __init__(self, path: Path, fps: float) -> None:
        self.preview = BoundedGif(fps)
        self.path = path.with_name(f"{path.name}.mp4")
        self.fps = fps
        path.parent.mkdir(parents=True, exist_ok=True)
        self._unfinished = path.with_name(f".{path.name}.unfinished.mp4")  # the suffix selects the format
        self._writer: Any = None

    def append(self, frame: Frame) -> None:
        self.preview.append(frame)
        if self._writer is None:
            import imageio

            # A block size of 1: imageio would stretch frames to multiples of 16.
            self._writer = imageio.get_writer(self._unfinished, fps=self.fps, macro_block_size=1, codec="libx264")
        # H.264 needs even numbers of rows and columns.
        rows, columns = frame.shape[0] % 2, frame.shape[1] % 2
        self._writer.append_data(np.pad(frame, ((0, rows), (0, columns), (0, 0)), mode="edge"))

    def close(self) -> None:
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


def check_imageio() -> None:
    """Raise a `ConfigurationError` if imageio or its ffmpeg is not installed."""
    check_installed("video", "video", "imageio", "imageio_ffmpeg")
