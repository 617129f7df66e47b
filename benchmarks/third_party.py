"""Train PPO for a few thousand steps on environments of other packages: `python benchmarks/third_party.py`.

`third_party.json` lists the packages. pip installs the newest release of each into a separate virtual environment that
also sees the packages of this interpreter. `results/third_party.json` gets the versions, the environment steps per CPU
second, and errors. `--page` writes the table of the guide from that file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "benchmarks" / "third_party.json"
RESULT = ROOT / "benchmarks" / "results" / "third_party.json"
PAGE = ROOT / "docs" / "third_party.md"
TABLE = re.compile(r"(<!-- packages -->\n).*(<!-- end of packages -->)", re.DOTALL)
INSTALL_SECONDS, RUN_SECONDS, MEASURE_SECONDS, MAX_ROLLOUTS = 600, 240, 20, 40


def make_environment(folder: Path) -> Path:
    """Make a virtual environment that also sees this interpreter's packages; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "outer.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"


def last_lines(text: str, folder: Path) -> str:
    """Return the end of an output, without paths of this machine."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    error = next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Failure|error)\b", line)), None)
    shown = error or "\n".join(lines[-3:])
    for path in (folder, ROOT, sys.prefix, Path.home(), tempfile.gettempdir()):
        shown = shown.replace(str(path), "…")
    return shown[:400]


def try_package(entry: dict[str, Any]) -> dict[str, Any]:
    """Install a package, train on its environment and return the result or the error."""
    wanted = [entry["package"], *entry.get("with", [])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = make_environment(folder / "venv")
        install = [str(python), "-m", "pip", "install", "--quiet", "--prefer-binary", *wanted]
        try:
            done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return entry | {"failed": "install", "error": f"no end within {INSTALL_SECONDS} s"}
        if done.returncode:
            return entry | {"failed": "install", "error": last_lines(done.stderr, folder)}
        quiet = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "OMP_NUM_THREADS": "1", "MUJOCO_GL": "egl"}
        search = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
        command = [str(python), __file__, "--one", json.dumps(entry)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=RUN_SECONDS,
                cwd=folder,
                env=os.environ | quiet | search,
                check=False,
            )
        except subprocess.TimeoutExpired:
            error = f"no end within {RUN_SECONDS} s"
            return entry | {"versions": installed(python, wanted), "failed": "run", "error": error}
        found = [line for line in done.stdout.splitlines() if line.startswith('{"versions"')]
        if done.returncode or not found:
            error = last_lines(done.stderr + f"\nstatus {done.returncode}", folder)
            return entry | {"versions": installed(python, wanted), "failed": "run", "error": error}
        return entry | json.loads(found[-1])


def installed(python: Path, wanted: list[str]) -> dict[str, str]:
    """Return the versions of packages in a virtual environment."""
    names = [re.split(r"[\[=<>]", name)[0] for name in (*wanted, "numpy", "gymnasium")]
    script = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    found: dict[str, str] = json.loads(subprocess.check_output([str(python), "-c", script, *names], text=True))
    return found


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the processes that it started."""
    import psutil

    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(time.user + time.system + time.children_user + time.children_system for time in times)


def run_one(entry: dict[str, Any]) -> dict[str, Any]:
    """Train PPO; return versions and environment steps per CPU second, without the first rollout."""
    import logging
    import time
    import warnings

    import torch
    from lightning.pytorch import Callback, Trainer

    from lightning_rl import PPO, RolloutDataModule

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)

    class Meter(Callback):
        """Stops after a time or a number of rollouts; the first rollout is not measured."""

        started = (0.0, 0.0, 0)

        def on_train_epoch_end(self, trainer: Trainer, pl_module: PPO) -> None:  # type: ignore[override]
            now = (time.monotonic(), cpu_seconds(), int(pl_module.env_steps))
            if trainer.current_epoch == 0:
                self.started = now
            self.wall, self.cpu, self.steps = (b - a for a, b in zip(self.started, now, strict=True))
            trainer.should_stop = self.wall > MEASURE_SECONDS or trainer.current_epoch >= MAX_ROLLOUTS

    options = {"num_envs": 8, "rollout_length": 64} | entry["data"]
    data = RolloutDataModule(**options, rollouts_per_epoch=1, seed=0)
    model = PPO(data.observation_space, data.action_space, **entry.get("model", {}))
    meter = Meter()
    trainer = Trainer(
        max_epochs=-1, callbacks=[meter], logger=False, accelerator="cpu", limit_val_batches=0,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, data)
    return {
        "versions": installed(Path(sys.executable), [entry["package"], *entry.get("with", [])]),
        "steps_per_cpu_second": round(meter.steps / meter.cpu),
        "steps": meter.steps,
        "seconds": round(meter.wall, 1),
        "observation_space": str(data.observation_space)[:200],
        "action_space": str(data.action_space)[:200],
    }


def table(entries: list[dict[str, Any]]) -> str:
    """Return the rows of the guide: working packages first, then failures."""
    lines = ["| package | id | options | steps/s |", "| --- | --- | --- | --- |"]
    failed = ["| package | id | what failed |", "| --- | --- | --- |"]
    for entry in sorted(entries, key=lambda entry: entry["package"].lower()):
        data, versions = entry["data"], entry.get("versions", {})
        packages = [re.split(r"[\[=<>]", name)[0] for name in (entry["package"], *entry.get("with", []))]
        named = ", ".join(f"{name} {versions.get(name, '')}".strip() for name in packages)
        start = f"| {named} | `{data['env_id']}` |"
        if "failed" in entry:
            failed.append(f"{start} {entry.get('note') or entry['error'].splitlines()[0]} |")
            continue
        env = data.get("env", {})
        options = [f"imports `{module}`" for module in env.get("imports", ())]
        for wrapper in env.get("wrappers", ()):
            options.append(f"wrapper `{wrapper if isinstance(wrapper, str) else wrapper['class_path']}`")
        options += [f"`kwargs: {json.dumps(env['kwargs'])}`"] if "kwargs" in env else []
        options += [f"`backend: {data['backend']}`"] if "backend" in data else []
        options += [entry["note"]] if entry.get("note") else []
        lines.append(f"{start} {'; '.join(options)} | {entry['steps_per_cpu_second']:,} |")
    return "\n".join([*lines, "", "These did not work:", "", *failed]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="try these only, and keep the other results")
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the results")
    parser.add_argument("--page", action="store_true", help="only write the table of the guide")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(run_one(arguments.one)))
        return
    before = json.loads(arguments.out.read_text())["packages"] if arguments.out.exists() else []
    if arguments.page:
        notes = {
            (entry["package"], entry["data"]["env_id"]): entry.get("note") for entry in json.loads(LIST.read_text())
        }
        for entry in before:
            if (note := notes.get((entry["package"], entry["data"]["env_id"]))) is not None:
                entry["note"] = note
        rows = table(before)
        PAGE.write_text(TABLE.sub(lambda match: match[1] + rows + match[2], PAGE.read_text()))
        return
    known = {(entry["package"], entry["data"]["env_id"]): entry for entry in before}
    entries = json.loads(LIST.read_text())
    if unknown := set(arguments.packages) - {entry["package"] for entry in entries}:
        parser.error(f"{', '.join(sorted(unknown))}: expected packages of {LIST.name}")
    for entry in entries:
        if arguments.packages and entry["package"] not in arguments.packages:
            continue
        print(entry["package"], end=": ", flush=True)
        found = known[entry["package"], entry["data"]["env_id"]] = try_package(entry)
        print(found.get("steps_per_cpu_second", found.get("error")), flush=True)
        listed = [(one["package"], one["data"]["env_id"]) for one in entries]
        kept = [known[key] for key in listed if key in known]
        arguments.out.write_text(json.dumps({"packages": kept}, indent=2) + "\n")


if __name__ == "__main__":
    main()
