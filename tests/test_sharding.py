"""`ModelParallelStrategy` (FSDP2) on two processes, compared with DDP: what `sharded_script` saw."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rl import PPO, FailedUpdate
from tests.programs import run_ranks
from tests.sharded_script import CASES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    run_ranks("-m", "tests.sharded_script", str(folder))
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_sharded_parameters_are_trained_as_by_ddp(ranks, case):
    for rank in ranks:
        ddp, sharded = rank["ends"][case]
        for name, parameter in sharded["parameters"].items():
            torch.testing.assert_close(parameter, ddp["parameters"][name], rtol=0, atol=1e-6)
        assert sharded["validated"] == ddp["validated"]
        for one, other in zip(ddp["rows"], sharded["rows"], strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6, nan_ok=True)
        assert max(row["first_ratio_error"] for row in sharded["rows"]) <= (1e-2 if case == "parts" else 1e-6)


def test_a_sharded_run_resumes_bit_for_bit(ranks):
    for rank in ranks:
        found = rank["checkpoints"]
        assert all(torch.equal(x, found["resumed"][name]) for name, x in found["whole"].items())
        assert found["rate"] == 1e-5


@pytest.mark.parametrize("resumed", ["by_ddp", "from_ddp"])
def test_runs_change_between_ddp_and_sharded_parameters(ranks, resumed):
    for rank in ranks:
        found = rank["checkpoints"]
        for name, parameter in found[resumed].items():
            torch.testing.assert_close(parameter, found["whole"][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["warming_up", "two"])
def test_a_sharded_run_resumes_optimizers_of_a_part_of_the_parameters(ranks, name):
    for rank in ranks:
        whole, resumed = rank["checkpoints"][name]
        for parameter in whole:
            torch.testing.assert_close(resumed[parameter], whole[parameter], rtol=0, atol=1e-6)


def test_a_checkpoint_of_a_sharded_run_is_tested_and_loads_in_one_process(ranks, folder):
    found = ranks[0]["checkpoints"]
    assert found["tested"] == found["tested_again"] and found["tested"]["test/episodes"] == 2
    model = PPO.load_from_checkpoint(folder / "end.ckpt")
    assert all(torch.equal(x, found["resumed"][name]) for name, x in model.named_parameters())
    assert model.env_steps == 256


def test_a_sharded_run_exports_whole_parameters(ranks, folder):
    (exported,) = (folder / "policies").iterdir()
    found = torch.export.load(exported / "greedy.pt2").state_dict
    whole = ranks[0]["exported"]
    assert all(found[name].shape == x.shape for name, x in whole.items())
    acting = {name for name in whole if name.startswith(("policy.actor", "policy.action"))}
    assert acting and all(torch.equal(found[name], whole[name]) for name in acting)
    assert not any(found[name].any() for name in whole.keys() - acting)  # the critic, which is left out


def test_a_failed_update_has_whole_parameters(ranks):
    for rank in ranks:
        path = re.search(r"load\('(.*)'\)", rank["failed"])[1]
        assert math.isnan(FailedUpdate.load(path).replay()["policy_loss"])
