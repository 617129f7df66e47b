"""The policy of a checkpoint as programs, with the score of some episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_rl.tools.export.policy import (
    FOLDER_PATTERN,
    ExportFormat,
    ProgramName,
    check_folder,
    check_options,
    export_policy,
)
from lightning_rl.tools.trained import Score, load_algorithm, load_data, modules_named_in, play_episodes


def export_checkpoint(
    path: Path,
    format: ExportFormat,
    output: str | Path | None,
    programs: Sequence[ProgramName],
    config: str | None = None,
    episodes: int = 10,
    trust: Sequence[str] = (),
) -> tuple[Path, str, Score, int]:
    """Play some episodes, write the programs, and compare their actions with the policy's.

    Args:
        path: The checkpoint.
        format: Of the programs.
        output: The folder; None: in `policies` beside checkpoints.
        programs: Which to write.
        config: Configuration of the run; None: the one in its folder.
        episodes: Episodes to play for the score.
        trust: Packages that the checkpoint may name.

    Returns:
        The folder, the id of the environment, the score, and the number of steps whose actions were compared.
    """
    check_options(format, programs)
    model = load_algorithm(path, "ckpt_path", trust=[*trust, *modules_named_in(config)])
    beside = path.absolute().parent.parent / "policies"
    folder = output or beside / f"{format}-{FOLDER_PATTERN.format(model.env_steps)}"
    check_folder("output", folder, format, programs)  # before episodes are played, which takes a while
    data = load_data(path, config, trust)
    score, observations = play_episodes(model, data, episodes)
    env_id = data.spec.env_id
    written = export_policy(
        model, folder, env_id, format=format, programs=programs, observations=observations, score=score.as_dict()
    )
    return written, env_id, score, len(observations)
