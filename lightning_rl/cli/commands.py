"""The commands that run no Trainer; the parameters of their functions are the options."""

from __future__ import annotations

from lightning_rl.cli import COMMANDS, TRAINER_COMMANDS
from lightning_rl.cli.errors import end_with_message
from lightning_rl.cli.parser import CommandParser, as_list, relative, say
from lightning_rl.tools.curves import Statistic
from lightning_rl.tools.export import PROGRAMS, TOLERANCE, ExportFormat, ProgramName
from lightning_rl.tools.hub import pull_from_hub, push_to_hub
from lightning_rl.tools.plots import Kind, draw_runs
from lightning_rl.tools.trained import config_of, export_checkpoint, find_trained
from lightning_rl.training.warning_filters import filter_command_line_warnings


def run_command(arguments: list[str]) -> bool:
    """Run the command that arguments begin with; return False if it is not in this module."""
    if not arguments or arguments[0] not in COMMANDS or arguments[0] in TRAINER_COMMANDS:
        return False
    filter_command_line_warnings()
    CommandParser.begin(arguments)
    try:
        options = make_parser(arguments[0]).parse_args(arguments[1:])
        globals()[arguments[0]](**options)
    except Exception as error:
        end_with_message(error, arguments)
        raise
    return True


def make_parser(command: str) -> CommandParser:
    """Return the parser of a command."""
    parser = CommandParser(prog=f"lightning-rl {command}", description=COMMANDS[command])
    if command == "plot":  # a list takes one positional argument otherwise
        about = "Folder of a run, or of several runs. Runs that differ in their seed only are one curve; "
        about += "runs with the same name are one curve too. Each environment has a panel."
        parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help=about)
    parser.add_function_arguments(globals()[command], as_positional=True, skip={"runs"} if command == "plot" else None)
    return parser


def plot(
    runs: list[str],
    metric: str | list[str] = "rollout/episode_return",
    statistic: Statistic = "iqm",
    confidence: float = 0.95,
    columns: int = 3,
    kind: Kind = "curves",
    out: str = "curves",
) -> None:
    """Draw runs.

    Args:
        runs: Folders.
        metric: Key of the metric in the log, or several as [a, b].
        statistic: Interquartile mean or mean over seeds.
        confidence: Confidence of the bootstrap interval over seeds.
        columns: Maximum number of panels side by side.
        kind: curves; or, of the last value of each run, profiles: the share of runs above each score, or improvement:
            the probability that a run of one algorithm beats one of another.
        out: File to write, .png, .svg or .pdf; without an ending both .png and .svg.
    """
    options = {"statistic": statistic, "confidence": confidence, "columns": columns, "kind": kind}
    paths = draw_runs(runs, as_list(metric), out, **options)  # type: ignore[arg-type]
    say("\n".join(map(str, paths)))


def export(
    ckpt_path: str = "last",
    format: ExportFormat = "onnx",
    output: str | None = None,
    programs: ProgramName | list[ProgramName] | None = None,
    config: str | None = None,
    episodes: int = 10,
    trust: str | list[str] | None = None,
) -> None:
    """Play some episodes, write the programs, and compare their actions with the policy's.

    Args:
        ckpt_path: The checkpoint: a file, or 'last' for the newest one or 'best' for the newest best one under runs;
            with --config, of its algorithm and environment.
        format: onnx for any runtime of ONNX (extra onnx), or torch_export for PyTorch.
        output: The folder; by default in `policies` beside checkpoints.
        programs: greedy takes the mode of the policy, sampled draws from it; by default both.
        config: Configuration of the run, for its environment; by default the one in the folder of the run.
        episodes: Episodes to play for the score in the description.
        trust: Packages, one or several as [a, b], whose classes and environments the checkpoint and the configuration
            beside it may name; lightning_rl, torch, gymnasium and the packages in --config are trusted.
    """
    path, names = find_trained(ckpt_path, config), as_list(programs or list(PROGRAMS))
    folder, env_id, score, steps = export_checkpoint(path, format, output, names, config, episodes, as_list(trust))
    say(f"Done: {', '.join(names)} as {format} in {relative(folder)}")
    say(f"  policy:  {relative(path)}")
    say(f"  score:   {score.mean:g} ± {score.std:g} in {score.episodes} episodes of {env_id}")
    say(f"  checked: actions within {TOLERANCE:g} of the policy's on {steps} steps of these")


def push(
    repo_id: str,
    ckpt_path: str = "last",
    config: str | None = None,
    episodes: int = 10,
    private: bool = False,
    message: str | None = None,
    trust: str | list[str] | None = None,
) -> None:
    """Upload a checkpoint and print its address.

    Args:
        repo_id: The repository, owner/name; created if it does not exist.
        ckpt_path: The checkpoint: a file, or 'last' for the newest one or 'best' for the newest best one under runs;
            with --config, of its algorithm and environment.
        config: Configuration of the run; by default the one in its folder.
        episodes: Episodes to play for the score.
        private: Whether a new repository is private.
        message: Message of the commit.
        trust: As for `export`: packages, one or several as [a, b], that the checkpoint and the configuration beside it
            may name.
    """
    path = find_trained(ckpt_path, config)
    options = {"config": config, "episodes": episodes, "private": private, "message": message}
    say(f"Done: {push_to_hub(repo_id, path, trust=as_list(trust), **options)}")  # type: ignore[arg-type]
    say(f"  checkpoint: {relative(path)}")


def pull(repo_id: str, revision: str | None = None, folder: str | None = None) -> None:
    """Download a checkpoint and print how to use it.

    Args:
        repo_id: The repository, owner/name.
        revision: A branch, tag or commit.
        folder: Folder for the files; by default the cache of the Hub.
    """
    path = pull_from_hub(repo_id, revision=revision, folder=folder)
    say(f"Done: {relative(path)}")
    if (config := config_of(path)) is not None:
        say(f"  next: lightning-rl test --config {relative(config)} --ckpt_path {relative(path)}")
