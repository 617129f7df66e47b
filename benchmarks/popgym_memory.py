"""Kinds of memory on a POPGym task of medium difficulty: `python benchmarks/popgym_memory.py [--seeds 5]`.

All kinds train with `configs/ppo/popgym_repeat_previous_medium.yaml`; the results of this configuration are the
results of `gtrxl`. The results of the other kinds go to `benchmarks/results/popgym_memory/<kind>/`; existing results
are kept. Needs the extra `popgym`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from record import RESULTS, ROOT

NAME = "ppo/popgym_repeat_previous_medium"
KINDS = ("gru", "lstm", "mingru")


def main() -> None:
    """Train every kind with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    config, script = ROOT / "configs" / f"{NAME}.yaml", ROOT / "benchmarks" / "reproduce.py"
    for seed in range(parser.parse_args().seeds):
        for kind in (None, *KINDS):
            out = RESULTS if kind is None else RESULTS / "popgym_memory" / kind
            memory = f"{{kind: {kind}, hidden_size: 64}}"
            changes = [] if kind is None else [f"--model.policy.memory={memory}"]
            if not (out / NAME / f"seed{seed}.json").exists():
                command = [sys.executable, script, config, "--seed", str(seed), "--out", out, *changes]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
