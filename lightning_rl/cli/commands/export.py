"""`lightning-rl export`: the policy of a checkpoint as programs."""

from __future__ import annotations

from typing import get_args

from lightning_rl.cli.commands import CKPT_PATH_HELP, COMMANDS, TRUST_HELP
from lightning_rl.cli.errors import OneErrorParser
from lightning_rl.cli.parser import as_list, relative, say
from lightning_rl.tools.export import FOLDER_PATTERN, PROGRAMS, TOLERANCE, ExportFormat, ProgramName, export_policy
from lightning_rl.tools.export.policy import check_folder, check_options
from lightning_rl.tools.trained import find_trained, load_algorithm, load_data, modules_named_in, play_episodes


def export_parser() -> OneErrorParser:
    """Return what reads the arguments."""
    made = OneErrorParser(prog="lightning-rl export", description=COMMANDS["export"])
    made.add_argument("--ckpt_path", type=str, required=True, help=CKPT_PATH_HELP)
    made.add_argument(
        "--format",
        type=ExportFormat,
        default="onnx",
        help=f"One of {', '.join(get_args(ExportFormat))}: for any runtime of ONNX (extra onnx), or for PyTorch alone.",
    )
    made.add_argument(
        "--output", type=str | None, default=None, help="The folder; by default in `policies` beside checkpoints."
    )
    made.add_argument(
        "--programs",
        type=ProgramName | list[ProgramName],
        default=list(PROGRAMS),
        help="greedy takes the mode of the policy, sampled draws from it; one of them, or both as [greedy, sampled].",
    )
    made.add_argument(
        "--config",
        type=str | None,
        default=None,
        help="Configuration of the run, for its environment; by default the one in the folder of the run.",
    )
    made.add_argument("--episodes", type=int, default=10, help="Episodes to play for the score that is written down.")
    made.add_argument("--trust", type=str | list[str], default=[], help=TRUST_HELP)
    return made


def export(arguments: list[str]) -> None:
    """Play some episodes, write the programs, and hold them to the policy on what was seen there."""
    options = export_parser().parse_args(arguments)
    programs = as_list(options.programs)
    check_options(options.format, programs)
    path = find_trained(options.ckpt_path, options.config)
    trust = as_list(options.trust)
    model = load_algorithm(path, "ckpt_path", trust=[*trust, *modules_named_in(options.config)])
    beside = path.absolute().parent.parent / "policies"
    output = options.output or beside / f"{options.format}-{FOLDER_PATTERN.format(model.env_steps)}"
    check_folder("output", output, options.format, programs)  # before episodes are played, which takes a while
    data = load_data(path, options.config, trust)
    score, observations = play_episodes(model, data, options.episodes)
    folder = export_policy(
        model,
        output,
        data.spec.env_id,
        format=options.format,
        programs=programs,
        observations=observations,
        score=score.as_dict(),
    )
    say(f"Done: {', '.join(programs)} as {options.format} in {relative(folder)}")
    say(f"  policy:  {relative(path)}")
    say(f"  score:   {score.mean:g} ± {score.std:g} in {score.episodes} episodes of {data.spec.env_id}")
    say(f"  checked: actions within {TOLERANCE:g} of the policy's on {len(observations)} steps of these")
