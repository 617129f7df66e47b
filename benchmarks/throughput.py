"""Time the workloads of `workloads.json`, on one thread, and print one line of JSON.

    OMP_NUM_THREADS=1 python benchmarks/throughput.py W1 --steps 100000

`--full` adds the parts of a user's run: TensorBoard, a progress bar, and ten checkpoints. `--share` measures
Lightning's share of a run: the same rollouts and updates alternate between the Trainer and a plain loop, with
TensorBoard and the progress bar, and with checkpoints for `--full`. `--save` writes this share to
`benchmarks/results/throughput/`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure

clock = measure.Clock()

import torch  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import TensorBoardLogger  # noqa: E402
from record import add_saving, save  # noqa: E402
from workload_models import BareLoop, make_data, make_model  # noqa: E402

import lightning_rl  # noqa: E402
from lightning_rl.callbacks.progress_bars import EnvStepProgressBar  # noqa: E402
from lightning_rl.rollouts.rollout import Rollout  # noqa: E402

clock.imported()


class Ticks(Callback):
    """Ticks the clock after each rollout, and keeps the returns of its episodes."""

    def __init__(self, clock: measure.Clock) -> None:
        self.clock = clock
        self.returns = measure.EPISODE_RETURNS
        self.steps = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Rollout, batch_idx: int
    ) -> None:
        self.tick(batch)

    def tick(self, rollout: Rollout) -> None:
        self.steps += rollout.num_steps
        self.returns += rollout.episodes.returns
        self.clock.tick(self.steps)


def fit(
    args: argparse.Namespace,
    workload: dict[str, Any],
    clock: measure.Clock,
    parts: str,
    instead: Sequence[Callback] = (),
) -> tuple[Ticks, list[torch.Tensor]]:
    """Train under the Trainer; return ticks and parameters.

    Args:
        args: Arguments of the command line.
        workload: The workload.
        clock: Clock to tick after every rollout.
        parts: `plain`, `shown` (TensorBoard every 10 rollouts, and a progress bar) or `full` (checkpoints too).
        instead: Callbacks in place of the one that ticks the clock.
    """
    data = make_data(workload, args.backend, args.seed)
    torch.manual_seed(args.seed)
    model = make_model(workload, data)
    ticks = Ticks(clock)
    with tempfile.TemporaryDirectory() as scratch:
        full = parts == "full"
        callbacks = list(instead or [ticks])
        if full:
            # An epoch is a tenth of the run, as in the shipped configurations, and ends with a checkpoint.
            data.rollouts_per_epoch = max(1, workload["rollouts"] // 10)
            callbacks.append(ModelCheckpoint(Path(scratch), save_last=True))
        shown = parts != "plain"
        callbacks += [EnvStepProgressBar()] if shown else []
        trainer = Trainer(
            accelerator="cpu",
            max_steps=-1,
            max_epochs=-1 if full else 1,
            logger=TensorBoardLogger(scratch, default_hp_metric=False) if shown else False,
            log_every_n_steps=10,
            enable_checkpointing=full,
            enable_progress_bar=shown,
            enable_model_summary=False,
            limit_val_batches=0,
            callbacks=[*callbacks, *([_StopAfter(workload["rollouts"])] if full else [])],
        )
        trainer.fit(model, data)
    return ticks, [p.detach().clone() for p in model.policy.parameters()]


class _StopAfter(Callback):
    """Ends the run after a number of rollouts, also within an epoch."""

    def __init__(self, rollouts: int) -> None:
        self.rollouts = rollouts

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 >= self.rollouts:
            trainer.should_stop = True


class Alternation(Callback):
    """After each rollout under the Trainer, learns from one in a plain loop, and records the CPU time of both."""

    def __init__(self, loop: BareLoop) -> None:
        self.loop = loop
        self.bare_rollouts = iter(loop)
        self.seconds: list[tuple[float, float]] = []
        self._resumed = time.process_time()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Rollout, batch_idx: int
    ) -> None:
        reached = time.process_time()
        next(self.bare_rollouts)
        done = time.process_time()
        self.seconds.append((reached - self._resumed, done - reached))
        self._resumed = time.process_time()


def share(args: argparse.Namespace, workload: dict[str, Any], parts: str) -> dict[str, Any]:
    """Measure Lightning's share of the CPU time, rollout by rollout in alternation.

    All work of the Trainer between two rollouts counts, callbacks and loggers included.

    Raises:
        RuntimeError: The final parameters differ, so both did not do the same work.
    """
    alternation = Alternation(BareLoop(workload, args.backend, args.seed))
    _, trained = fit(args, workload, measure.Clock(), parts, [alternation])
    expected = alternation.loop.model.policy.parameters()
    if not all(torch.equal(x, y) for x, y in zip(trained, expected, strict=True)):
        raise RuntimeError("the Trainer and the bare loop end with different parameters")
    timed = alternation.seconds[measure.WARM_UP :]
    length = max(1, len(timed) // 5)
    fifths = [timed[begin : begin + length] for begin in range(0, length * (len(timed) // length), length)]
    return {
        "workload": args.workload,
        "backend": args.backend,
        "with": "TensorBoard, progress bar" + (", ten checkpoints" if parts == "full" else ""),
        "seed": args.seed,
        "env_steps": len(timed) * workload["rows"],
        "threads": measure.THREADS,
        "cpu_seconds_trainer": round(sum(under for under, _ in timed), 3),
        "cpu_seconds_bare": round(sum(alone for _, alone in timed), 3),
        "lightning_share": round(_share(timed), 4),
        "lightning_share_by_fifths": [round(_share(fifth), 4) for fifth in fifths],
    }


def _share(seconds: list[tuple[float, float]]) -> float:
    under, alone = (sum(column) for column in zip(*seconds, strict=True))
    return 1 - alone / under


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measure.add_arguments(parser)
    parser.add_argument("--backend", choices=["sync", "native", "torch", "envpool"], default="sync")
    parser.add_argument("--compiled", action="store_true", help="compile the update")
    parser.add_argument("--plain", action="store_true", help="disable fast paths")
    parser.add_argument("--full", action="store_true", help="with logger, checkpoints and progress bar")
    parser.add_argument("--share", action="store_true", help="measure the share of Trainer, hooks and logging")
    add_saving(parser)
    parsed = parser.parse_args(args)
    if parsed.share and "algorithm" in measure.WORKLOADS[parsed.workload]:
        parser.error(f"workload={parsed.workload!r}: expected one of PPO for --share")
    if parsed.compiled + parsed.plain + parsed.share > 1:
        parser.error(
            "expected one of --compiled, --plain and --share: the plain loop of --share has the default engine"
        )
    if parsed.save and not parsed.share:
        parser.error("--save: expected --share, whose result it writes")
    return parsed


def _fast_paths(args: argparse.Namespace) -> str:
    return "compiled" if args.compiled else "none" if args.plain else "auto"


if __name__ == "__main__":
    arguments = parse()
    torch.set_num_threads(measure.THREADS)
    chosen = measure.workload(arguments) | {"fast_paths": _fast_paths(arguments)}
    if arguments.share:
        kind = "full" if arguments.full else "shown"
        result = share(arguments, chosen, kind)
        parts = [arguments.workload, *([] if arguments.backend == "sync" else [arguments.backend]), kind]
        save(result, arguments.save, f"throughput/share-{'-'.join(parts)}.json")
        print("\n" + json.dumps(result), flush=True)
        sys.exit()
    clock.with_children = "actors" in chosen
    ticks, _ = fit(arguments, chosen, clock, "full" if arguments.full else "plain")
    options = [name for name in ("compiled", "plain", "full") if getattr(arguments, name)]
    variant = ", ".join([arguments.backend, *options])
    measure.report("lightning_rl", lightning_rl.__version__, arguments, clock, ticks.returns, variant)
