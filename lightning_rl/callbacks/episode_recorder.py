"""Episodes of `predict` as videos, as a data set and as printed lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]

from lightning_rl.callbacks.video import Films, check_imageio, data_of
from lightning_rl.data.recorded_episodes import check_can_write, write_minari
from lightning_rl.distributed import gather_on_rank_zero, gather_ranks
from lightning_rl.files import print_line, relative
from lightning_rl.rollouts.rollout import Episode
from lightning_rl.validation import ConfigurationError, check, make_folder

RecordAs: TypeAlias = Literal["video", "minari"]
_CHECKS: dict[RecordAs, Callable[[], object]] = {"video": check_imageio, "minari": check_can_write}


def _installed() -> Iterator[RecordAs]:
    """Yield the formats whose packages are installed, and log which packages the others need."""
    for one, check_packages in _CHECKS.items():
        try:
            check_packages()
            yield one
        except ConfigurationError as error:
            rank_zero_info(f"Left out: {error}")


class EpisodeRecorder(Callback):
    """Write the episodes of `predict` into a folder.

    Videos are `episode=….mp4`, with the episode numbers that the command line prints, counted over all ranks. The
    Minari data set `minari/<environment>/<algorithm>-v0` has the observations of the policy and the actions that the
    environment received. Recording does not change the episodes, except that a video with backend `native` films
    single environments, which have other seeds.

    Args:
        folder: Folder for the files.
        formats: `video`, `minari` or both; None is both, as far as their packages are installed.
        env_kwargs: Additional arguments for the constructor of filmed environments, such as `width` and `height`.

    Attributes:
        formats: Formats that are written; with None, `setup` chooses them.
        dataset: Folder of the newest data set, on the first rank.

    Raises:
        ConfigurationError: A format is unknown or, in `setup`, cannot be written.
    """

    def __init__(
        self, folder: str | Path, formats: Sequence[RecordAs] | None = None, env_kwargs: dict[str, Any] | None = None
    ) -> None:
        known = get_args(RecordAs)
        check(set(formats or ()) <= {*known}, "formats", formats, f"a list of {' or '.join(known)}, or both")
        self.folder = Path(folder)
        self.formats: tuple[RecordAs, ...] = tuple(formats or ())
        self.env_kwargs = env_kwargs
        self.dataset: Path | None = None
        self._episodes: list[Episode] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that everything can be written before an episode is played."""
        if stage != "predict":
            return
        data = data_of(trainer)
        self.formats = self.formats or tuple(_installed()) or get_args(RecordAs)
        for one in self.formats:
            _CHECKS[one]()
        if "video" in self.formats:
            data.check_filmable(self.env_kwargs)
        make_folder("folder", self.folder)
        if "video" in self.formats:
            data.film_predictions(Films(self.folder), self.env_kwargs)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._episodes = []

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: list[Episode], *args: object
    ) -> None:
        self._episodes += outputs if "minari" in self.formats else []

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if "video" in self.formats:
            rank_zero_info(f"Videos: {self.folder}")
        if "minari" in self.formats:
            episodes = list(chain.from_iterable(gather_on_rank_zero(self._episodes)))
            if trainer.is_global_zero:
                self._write(trainer, type(pl_module).__name__, episodes)
        self._episodes = []

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "predict" and "video" in self.formats:
            data_of(trainer).film_predictions(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "predict" if trainer.predicting else "")

    def _write(self, trainer: Trainer, algorithm: str, episodes: list[Episode]) -> None:
        data, root = data_of(trainer), self.folder / "minari"
        env_id = data.spec.env_id.rpartition(":")[2]
        name = f"{env_id.rpartition('/')[2]}/{algorithm.lower()}"
        spaces = data.observation_space, data.action_space
        dataset_id = write_minari(episodes, root, name, spaces, env_id, algorithm)
        self.dataset = root / dataset_id
        rank_zero_info(f"Minari data set: {self.dataset} (MINARI_DATASETS_PATH={relative(root)}, id {dataset_id})")


class EpisodeLines(Callback):
    """Print return, length and ending of the episodes of `predict` on all ranks.

    A callback, since the Trainer returns the episodes of one rank only, and none from processes that it spawned.
    """

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lines: list[str] = []

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: list[Episode], *args: object
    ) -> None:
        for episode in outputs:
            ending = "terminated" if episode.terminated else "truncated"
            self.lines.append(f"return {episode.episode_return:g}, {episode.length} steps, {ending}")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for number, line in enumerate(chain.from_iterable(gather_ranks(self.lines))):
            if trainer.is_global_zero:
                print_line(f"episode {number}: {line}")
