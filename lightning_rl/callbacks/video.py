"""Videos of the policy as it learns."""

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
    """Film episodes once at least so many environment steps have passed since the last time, and at the end.

    They are played by the first rank, in environments and with seeds of their own: the same episodes each time, and a
    run with this callback ends with the same weights as one without. The run waits for it. Files
    `step=…-episode=….mp4` come to be (`.gif` where imageio's ffmpeg is not installed), and loggers that show videos get
    them: TensorBoard a small moving picture, W&B and MLflow the file.

    Args:
        every_n_env_steps: Environment steps of all ranks between videos.
        episodes: How many episodes to film each time.
        dirpath: Folder; by default `videos` in that of the logger, or without one in that of the Trainer.
        env_kwargs: More arguments of the constructor of the environment that is filmed, such as `width` and `height`
            of MuJoCo's.

    Raises:
        ConfigurationError: In `setup`: the environment cannot be filmed, which says why, and what can be; or the
            folder cannot be written.
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
        """Take one picture, so that what is missing is known before anything is trained."""
        if stage == "fit" and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            check_imageio()
            data_of(trainer).check_filmable(self.env_kwargs)
            if self.dirpath is not None:
                make_folder("dirpath", self.dirpath)

    def on_interval(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Film the policy as it is now."""
        folder = self.folder(trainer)  # every rank: they agree on it
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
        """Film the last one too, unless it has just been filmed."""
        self.fire(trainer, pl_module, force=True)

    def folder(self, trainer: Trainer) -> Path:
        """Return the folder that the videos are in; a collective call."""
        if self.dirpath is not None:
            return Path(self.dirpath)
        return Path(trainer.log_dir or trainer.default_root_dir) / "videos"


def data_of(trainer: Trainer) -> RolloutDataModule:
    """Return the data module, whose environments can be filmed.

    Raises:
        ConfigurationError: There is none.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    check(isinstance(data, RolloutDataModule), "datamodule", type(data).__name__, "a RolloutDataModule to film")
    return data  # type: ignore[no-any-return]


def show_video(logger: Logger, tag: str, video: VideoFile, step: int) -> None:
    """Give a finished video to a logger, if it is one that shows videos.

    Args:
        logger: `TensorBoardLogger`, `MLFlowLogger`, or any that has `log_video` as `WandbLogger` has; others get none.
        tag: What the video is called there.
        video: The video.
        step: Environment steps at which it was filmed.
    """
    if isinstance(logger, TensorBoardLogger):
        _add_to_tensorboard(logger, tag, video, step)
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_artifact(logger.run_id, str(video.path), artifact_path="videos")
    elif callable(log_video := getattr(logger, "log_video", None)):
        log_video(tag, [str(video.path)], step=step, format=[video.path.suffix.removeprefix(".")])


def _add_to_tensorboard(logger: TensorBoardLogger, tag: str, video: VideoFile, step: int) -> None:
    # As `SummaryWriter.add_video` does, which needs moviepy to make the same picture.
    from tensorboard.compat.proto.summary_pb2 import Summary

    height, width = video.preview.frames[0].shape[:2]
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=video.preview.encode())
    event_files(logger).add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


@contextlib.contextmanager
def evaluating(module: LightningModule) -> Iterator[None]:
    """Have every part of a module evaluate, and then do again what it did."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
