"""Two nodes, each a process of this machine, as `torchrun` and SLURM start them."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import Program, communicate

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests/multi_node_script.py"


def torchrun(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    options = f"--nnodes 2 --nproc_per_node 1 --node_rank {node} --master_addr 127.0.0.1 --master_port {port}"
    return ["-m", "torch.distributed.run", *options.split()], {}


def slurm(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """What `srun` tells each task: there is no SLURM here, but Lightning reads nothing else."""
    told = {"JOB_ID": "7", "JOB_NAME": "ppo", "NTASKS": "2", "NTASKS_PER_NODE": "1", "NNODES": "2", "LOCALID": "0"}
    told |= {"PROCID": str(node), "NODEID": str(node), "NODELIST": "127.0.0.1"}
    return [], {f"SLURM_{name}": value for name, value in told.items()} | {"MASTER_PORT": str(port)}


@pytest.fixture(scope="module", params=[torchrun, slurm], ids=["torchrun", "slurm"])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What both nodes printed and left behind."""
    folder = tmp_path_factory.mktemp("nodes")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if "RANK" not in name and name != "WORLD_SIZE"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = []
    for node in range(2):
        launcher, told = request.param(node, port)
        environment = kept | told | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        started = {"env": environment, "join": True, "ranks": int(bool(launcher))}
        processes.append(Program(*launcher, str(SCRIPT), str(folder), **started))
    output = communicate(processes)
    print(*output)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(output)
    ranks = [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]
    return {"folder": folder, "output": output, "ranks": ranks}


def test_the_example_ends_with_equal_weights_on_both_nodes(nodes):
    first, second = nodes["ranks"]
    for kind in ("parameters", "command_line"):
        assert all(torch.equal(first[kind][name], parameter) for name, parameter in second[kind].items())
    assert first["env_steps"] == second["env_steps"] == 2048
    assert (nodes["folder"] / "example/last.ckpt").is_file()


def test_nodes_have_the_run_folder_of_the_first_and_make_no_other(nodes):
    (run_dir,) = (nodes["folder"] / "runs/ppo/CartPole-v1").iterdir()
    assert run_dir.name == "version_0"
    assert {path.name for path in run_dir.iterdir()} >= {"config.yaml", "hparams.yaml", "checkpoints"}
    assert len(list(run_dir.glob("events.out.tfevents.*"))) == 1
    # Lightning asks the first rank: what callbacks get from the Trainer is right on all nodes.
    assert {Path(rank["log_dir"]) for rank in nodes["ranks"]} == {run_dir.relative_to(nodes["folder"])}


def test_predict_prints_the_episodes_of_both_nodes_once(nodes):
    printed = [re.findall(r"^episode (\d): return \d+, \d+ steps, ", text, re.MULTILINE) for text in nodes["output"]]
    assert printed == [["0", "1", "2"], []]


def test_ray_workers_end_with_equal_weights():
    pytest.importorskip("ray.train", exc_type=ImportError)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from examples.multi_node.ray_train import main; main(max_env_steps=2048)"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=240, check=False, **pipes)
    assert done.returncode == 0, done.stdout
    found = re.findall(r"rank (\d): 2048 environment steps, .* norm of weights (\S+)", done.stdout)
    assert {rank for rank, _ in found} == {"0", "1"}
    assert len({norm for _, norm in found}) == 1
