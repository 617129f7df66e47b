"""Videos of the policy during training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]

from lightning_rl.callbacks.env_steps import EnvStepInterval
from lightning_rl.checkpointing.atomic import event_files
from lightning_rl.data.datamodule import RolloutDataModule
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.tools.video_files import Films, VideoFile, check_imageio
from lightning_rl.validation import check, check_positive_int, make_folder

_TAG = "video/episode={}"


class VideoRecorder(EnvStepInterval):
    """Film episodes after each interval of environment steps, and at the end.

    The first rank plays the same episodes each time, in separate environments with separate seeds; training is not
    affected, but waits. The files are `step=…-episode=….mp4` (`.gif` without imageio's ffmpeg). TensorBoard gets a
    small animation, W&B and MLflow the file.

    Args:
        every_n_env_steps: Environment steps of all ranks between videos.
        episodes: Number of episodes to film each time.
        dirpath: Folder; by default `videos` in the folder of the logger or, without one, of the Trainer.
        env_kwargs: Additional arguments for the constructor of the filmed environment, such as `width` and `height`.

    Raises:
        ConfigurationError: In `setup`: the environment cannot be filmed, or the folder cannot be written.
    """

    def __init__(
        self,
        every_n_env_steps: int,
        episodes: int = 1,
        dirpath: str | Path | None = None,
        env_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_positive_int("every_n_env_steps", every_n_env_steps)
        check_positive_int("episodes", episodes)
        super().__init__(every_n_env_steps)
        self.episodes = episodes
        self.dirpath = dirpath
        self.env_kwargs = env_kwargs

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            check_imageio()
            data_of(trainer).check_filmable(self.env_kwargs)
            if self.dirpath is not None:
                make_folder("dirpath", self.dirpath)

    def on_interval(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = self.folder(trainer)  # a collective call
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        step, data = int(pl_module.env_steps), data_of(trainer)  # type: ignore[arg-type]

        def show(number: int, video: VideoFile) -> None:
            for logger in trainer.loggers:
                show_video(logger, _TAG.format(number), video, step)

        with evaluating(pl_module):
            try:
                data.film(Films(folder, f"step={step}-episode={{}}", show), self.episodes, self.env_kwargs)
            except EnvironmentFailure as error:
                if data.spec.env.on_failure == "raise":
                    raise
                rank_zero_warn(f"no video at {step} environment steps: {error}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.fire(trainer, pl_module, force=True)

    def folder(self, trainer: Trainer) -> Path:
        if self.dirpath is not None:
            return Path(self.dirpath)
        return Path(trainer.log_dir or trainer.default_root_dir) / "videos"


def data_of(trainer: Trainer) -> RolloutDataModule:
    """Return the data module, or raise a `ConfigurationError` if it is not a `RolloutDataModule`."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    check(isinstance(data, RolloutDataModule), "datamodule", type(data).__name__, "a RolloutDataModule to film")
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


@contextlib.contextmanager
def evaluating(module: LightningModule) -> Iterator[None]:
    """Set a module to evaluation mode inside, and restore the mode of each part."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
