"""What starts with the command line: as little as it can, counted in modules."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import contextlib, io, json, sys
import lightning.pytorch
before = set(sys.modules)
from lightning_rl.__main__ import run
sys.argv[1:] = ["--help"]
with contextlib.redirect_stdout(io.StringIO()) as printed:
    try:
        run()
    except SystemExit as end:
        assert end.code == 0
print(json.dumps({"more": sorted(set(sys.modules) - before), "all": sorted(sys.modules), "help": printed.getvalue()}))
"""
# What a run needs and help does not; matplotlib Lightning imports by itself, by way of torchmetrics.
HEAVY = {
    *("tensorboard", "matplotlib", "scipy", "onnx", "onnxruntime", "ray", "optuna", "huggingface_hub"),
    *("mujoco", "ale_py", "envpool", "Box2D", "pygame", "cv2", "minigrid"),
}


def test_help_imports_little_more_than_lightning():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=280
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert "fit" in seen["help"]
    more = [name for name in seen["more"] if name.partition(".")[0] != "lightning_rl"]
    assert not [name for name in more if name.partition(".")[0] in HEAVY]
    assert "tensorboard" not in seen["all"]
    assert not [name for name in more if name.startswith("gymnasium.envs.") and "mujoco" in name]
    # 140 with Gymnasium 1.4 and jsonargparse 4.53; any large package more would have hundreds.
    assert len(more) < 250, more
