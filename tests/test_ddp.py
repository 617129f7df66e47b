"""Contract 6, on two processes of one machine: what `ddp_script` saw there."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rl import FailedUpdate
from tests import recorded_combinations
from tests.ddp_script import PHASES, learn_duals
from tests.programs import run_ranks
from tests.recorded import (
    CASES,
    EPOCHS,
    MINIBATCHES_OF_A_PASS,
    NUM_ENVS,
    ROLLOUTS,
    UPDATES,
    fixed_model,
    learn_alone,
    side_by_side,
)
from tests.recorded_combinations import RANKED

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
TOLERANCES = {"32-true": 1e-6, "64-true": 1e-12}
OWN_TO_A_RANK = ("time/rollout_seconds", "time/update_seconds", "time/steps_per_second")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What one process learned; the rollouts are left for the ranks."""
    learned = {case: learn_alone(*case) for case in CASES}
    torch.save({case: rollouts for case, (_, rollouts) in learned.items()}, folder / "recorded.pt")
    return {case: result for case, (result, _) in learned.items()}


@pytest.fixture(scope="module")
def combined_alone(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The same of kinds of spaces, memory and agents."""
    learned = {name: recorded_combinations.learn_alone(name) for name in RANKED}
    torch.save({name: recorded for name, (_, recorded) in learned.items()}, folder / "combinations.pt")
    return {name: parameters for name, (parameters, _) in learned.items()}


@pytest.fixture(scope="module")
def ranks(folder: Path, alone: dict[Any, Any], combined_alone: dict[str, Any]) -> list[dict[str, Any]]:
    """What both ranks left."""
    run_ranks("-m", "tests.ddp_script", str(folder))
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def test_ranks_end_with_equal_weights_and_statistics(ranks):
    first, second = (rank["ran"] for rank in ranks)
    assert same(first["parameters"], second["parameters"])
    assert same(first["moments"], second["moments"])
    assert same(first["reward_moments"], second["reward_moments"])


def test_ranks_have_different_environments_and_know_only_their_own(ranks):
    first, second = (rank["ran"] for rank in ranks)
    for one, other in zip(first["observations"], second["observations"], strict=True):
        assert not (one == other).all(-1).any()
    assert not (first["discounted_return"] == second["discounted_return"]).any()


def test_clock_counts_the_steps_of_all_ranks(ranks):
    for rank in ranks:
        assert [row["env_steps"] for row in rank["ran"]["rows"]] == [64, 128, 192, 256, 320, 384]
        assert rank["ran"]["moments"]["count"] == rank["ran"]["reward_moments"]["count"] == 384


def test_every_rollout_is_on_policy_on_every_rank(ranks):
    for rank in ranks:
        assert max(row["first_ratio_error"] for row in rank["ran"]["rows"]) <= 1e-6


def test_ranks_stop_early_together(ranks):
    first, second = (rank["ran"] for rank in ranks)
    assert first["updates"] == second["updates"]
    assert 6 <= first["updates"] < 6 * 4 * 2  # of six rollouts, four epochs and two minibatches
    norms = [[row["grad_norm"] for row in run["rows"]] for run in (first, second)]
    assert norms[0] == norms[1]  # they are of the gradient that all ranks share


def test_logged_values_agree(ranks):
    first, second = (rank["ran"] for rank in ranks)
    assert first["logged"] == second["logged"]
    assert first["validated"] == second["validated"]
    logged = first["logged"][0]
    for name in ("policy_loss", "entropy", "approx_kl"):
        each = [rank["ran"]["rows"][0][name] for rank in ranks]
        assert each[0] != each[1]
        assert logged[f"train/{name}"] == pytest.approx(sum(each) / 2, rel=1e-5)


def test_only_one_rank_writes_and_its_x_axis_is_environment_steps(ranks):
    assert ranks[1]["ran"]["log_calls"] == []
    calls = ranks[0]["ran"]["log_calls"]
    assert [step for metrics, step in calls if "train/policy_loss" in metrics] == [64, 128, 192, 256, 320, 384]
    assert [step for metrics, step in calls if "val/episode_return" in metrics] == [192, 384]


def test_validation_plays_exactly_the_asked_number_of_episodes_over_all_ranks(ranks):
    first, second = (rank["ran"] for rank in ranks)
    for mine, others in zip(first["episodes"], second["episodes"], strict=True):
        assert len(mine) + len(others) == 3
        assert {len(mine), len(others)} == {1, 2}
    played = first["episodes"][-1] + second["episodes"][-1]
    assert first["validated"]["val/episodes"] == 3
    assert first["validated"]["val/episode_return"] == pytest.approx(sum(played) / 3)
    assert first["validated"]["val/episode_return_max"] == max(played)


def test_no_warning_that_a_user_cannot_act_on(ranks):
    ignored = re.compile("LeafSpec|no checkpoint callback")
    for rank in ranks:
        assert [message for message in rank["ran"]["warnings"] if not ignored.search(message)] == []


@pytest.mark.parametrize(("option", "precision"), CASES)
def test_two_ranks_take_the_steps_of_one_process_with_all_environments(ranks, alone, option, precision):
    """Five rollouts with normalisers, minibatches and another number of real steps on each rank."""
    one, tolerance = alone[option, precision], TOLERANCES[precision]
    for rank in ranks:
        learned = rank["learned"][option, precision]
        for kind in ("parameters", "moments", "reward_moments"):
            for name, value in one[kind].items():
                torch.testing.assert_close(
                    learned[kind][name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
                )
        assert (learned["updates"], learned["env_steps"]) == (one["updates"], one["env_steps"])
    assert one["env_steps"] == one["moments"]["count"] < ROLLOUTS * 12 * 2 * NUM_ENVS
    if option == "minibatch":
        assert ROLLOUTS <= one["updates"] < ROLLOUTS * EPOCHS * MINIBATCHES_OF_A_PASS  # stopped by target_kl
    else:
        assert one["updates"] == UPDATES[option]


@pytest.mark.parametrize(("option", "precision"), CASES)
def test_two_ranks_log_what_one_process_does(ranks, alone, option, precision):
    logged = ranks[0]["learned"][option, precision]["logged"]
    assert len(logged) == ROLLOUTS
    for (step, row), (expected_step, expected) in zip(logged, alone[option, precision]["logged"], strict=True):
        assert step == expected_step
        assert row.keys() == expected.keys()
        size = {"train/loss": expected["train/total_abs_loss"]}  # of the terms that cancel in it
        for name in row.keys() - {*OWN_TO_A_RANK, "train/aux_memory_bytes"}:
            rel, atol = 1e-3 if precision == "32-true" else 1e-6, 1e-6 * max(1.0, size.get(name, 0.0))
            assert row[name] == pytest.approx(expected[name], rel=rel, abs=atol), name


def test_compute_loss_is_over_the_rows_of_all_ranks(ranks, folder):
    pairs = torch.load(folder / "recorded.pt", weights_only=False)["minibatch", "64-true"]
    expected = fixed_model().compute_loss([side_by_side(*pair) for pair in pairs])
    for rank in ranks:
        assert rank["computed"] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", RANKED)
def test_two_ranks_take_the_steps_of_one_process_whatever_spaces_memory_and_agents(ranks, combined_alone, name):
    for rank in ranks:
        learned = rank["combined"][name]
        assert len(learned["errors"]) == 2 and max(learned["errors"]) <= 1e-12
        torch.testing.assert_close(learned["parameters"], combined_alone[name], rtol=0, atol=1e-12)


def test_a_rollout_that_is_not_finite_on_one_rank_stops_both_unchanged(ranks):
    for rank in ranks:
        assert rank["failed"].startswith("unchanged: "), rank["failed"]
        assert "is nan in the update from rollout 0" in rank["failed"]
        # Where it began, and nowhere else, the update was saved, and is made again.
        assert rank["failed"].endswith("failed-update-0-rank1.pt').replay() repeats it")
        path = re.search(r"load\('(.*)'\)", rank["failed"])[1]
        assert all(math.isnan(FailedUpdate.load(path).replay()[term]) for term in ("policy_loss", "grad_norm"))
        assert not Path(path.replace("rank1", "rank0")).exists()


@pytest.mark.parametrize("name", PHASES)
def test_ranks_go_through_the_phases_of_ppg_together(ranks, name):
    """Four rollouts: at least two auxiliary phases, whatever parameters a loss leaves out."""
    first, second = (rank["phases"][name] for rank in ranks)
    assert same(first["parameters"], second["parameters"])
    assert len(first["divergences"]) == len(second["divergences"]) >= 2
    assert all(0 < x < 0.1 for x in first["divergences"])
    assert first["kept"] == second["kept"]


def test_a_rank_without_steps_leaves_duals_and_policy_to_the_others(ranks):
    """V-MPO takes the steps of one process that has the rollouts of the first rank alone."""
    alone = learn_duals(0)
    for rank in ranks:
        torch.testing.assert_close(rank["duals"], alone, rtol=0, atol=1e-12)


def test_ranks_skip_the_same_steps_in_16_mixed_and_fail_together(ranks):
    first, second = (rank["float16"] for rank in ranks)
    assert same(first["parameters"], second["parameters"])
    assert first["scale"] == second["scale"] < 2**12
    assert first["skipped"] == second["skipped"]
    assert 0 < first["skipped"][0] < 1 and first["skipped"][1] < 1
    assert first["error"] == second["error"] and "is nan in the update from rollout 2" in first["error"]
    path = re.search(r"load\('(.*)'\)", first["error"])[1]
    assert math.isnan(FailedUpdate.load(path).replay()["policy_loss"])


def test_restarts_of_all_ranks_since_the_last_log_are_counted(ranks):
    assert [rank["restarts"] for rank in ranks] == [[4, 4], []]


def test_what_is_written_of_all_ranks_is_told_to_the_first_alone(ranks):
    """A checkpoint may have gigabytes of each, which need no room on the others, nor on GPUs."""
    both = [{"rank": 0}, {"rank": 1}]
    assert [rank["gathered"]["told"] for rank in ranks] == [[both] * 3, [[]] * 3]
    assert [rank["gathered"]["groups"] for rank in ranks] == [1, 1]
    assert not any(rank["gathered"]["is_copied"] for rank in ranks)  # a copy would double the memory of rank 0


def test_times_are_those_of_all_ranks_too(ranks):
    logged = ranks[0]["ran"]["logged"][0]
    assert all(math.isfinite(logged[name]) and logged[name] > 0 for name in OWN_TO_A_RANK)


@pytest.mark.parametrize("num_actors", ["0", "1"])
def test_ranks_replay_what_is_their_own_and_take_the_same_steps(ranks, num_actors):
    """CLEAR, from rollouts in step and from those of an actor of each rank."""
    first, second = (rank["replays"][num_actors] for rank in ranks)
    assert same(first["parameters"], second["parameters"])
    for one, other in zip(first["firsts"], second["firsts"], strict=True):
        assert not (one == other).all(-1).any()
    assert not torch.equal(first["drawn"], second["drawn"])
    for run in (first, second):
        assert run["env_steps"] == [64, 128, 192, 256, 320]
        # An actor is one rollout ahead, unless the learner was quicker than it.
        assert run["policy_lag"][0] == 0 and len(run["policy_lag"]) == 5
        assert set(run["policy_lag"]) <= ({0} if num_actors == "0" else {0, 1})
    assert len(first["kept"]) == len(second["kept"]) == 10
    assert not any(torch.equal(x, y) for x in first["kept"] for y in second["kept"])
    assert first["logged"] == second["logged"] and first["logged"]["train/replay_unrolls"] == 6
