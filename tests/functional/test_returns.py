"""Returns against loops, hand-worked numbers and identities. The golden vectors are in test_golden.py."""

import pytest
import torch
from torch import Tensor

from lightning_rl.functional import discounted_returns, gae, reverse_scan, td_lambda_returns, vtrace

from .helpers import EXACT, LENGTHS, log_rhos_like, trajectory, without
from .loops import loop_gae, loop_td_lambda, loop_vtrace

# -- each return against its loop


@pytest.mark.parametrize("steps", LENGTHS)
def test_returns_equal_their_loops(steps: int) -> None:
    rows = trajectory(steps, 3, 2)
    log_rhos = log_rhos_like(rows["rewards"])
    torch.testing.assert_close(gae(**rows), loop_gae(**rows), **EXACT)
    rest = without(rows, "values")
    torch.testing.assert_close(td_lambda_returns(**rest), loop_td_lambda(**rest), **EXACT)
    for clips in [(1.0, 1.0, 1.0), (0.7, 1.3, 2.2), (None, None, None), (2.0, None, 0.5)]:
        inputs = (log_rhos, *rows.values(), *clips)
        torch.testing.assert_close(tuple(vtrace(*inputs)), loop_vtrace(*inputs), **EXACT)


def test_scalar_discounts_and_traces_equal_constant_tensors() -> None:
    rewards, values, next_values, _, _ = trajectory(8, 3).values()
    log_rhos, full = log_rhos_like(rewards), torch.ones_like(rewards)
    for discounts, traces in [(0.97, 0.9), (0.97 * full, 0.9), (0.97, 0.9 * full[:, :1])]:
        for function, rows in [
            (td_lambda_returns, (rewards, next_values)),
            (gae, (rewards, values, next_values)),
            (vtrace, (log_rhos, rewards, values, next_values)),
        ]:
            expected = function(*rows, 0.97 * full, 0.9 * full)
            torch.testing.assert_close(function(*rows, discounts, traces), expected, **EXACT)


def test_gae_by_hand() -> None:
    values, next_values = torch.tensor([[2.0], [4.0], [6.0]]), torch.tensor([[4.0], [6.0], [8.0]])
    # With gamma = lambda = 1 / 2 the deltas are 1 + 2 - 2 = 1, 1 + 3 - 4 = 0 and 1 + 4 - 6 = -1.
    advantages = gae(torch.ones(3, 1), values, next_values, 0.5, 0.5)
    assert advantages.flatten().tolist() == [1 - 1 / 16, -1 / 4, -1.0]


def test_gae_terminal_state_cuts_bootstrap() -> None:
    rewards, values = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0], [20.0], [30.0]])
    discounts, traces = torch.tensor([[0.5], [0.0], [0.5]]), torch.tensor([[1.0], [0.0], [1.0]])
    advantages = gae(rewards, values, torch.tensor([[20.0], [1e9], [40.0]]), discounts, traces)
    # -7 = 3 + 20 - 30;  -18 = 2 + 0 - 20;  -8 = 1 + 10 - 10 + (-18) / 2
    assert advantages.flatten().tolist() == [-8.0, -18.0, -7.0]


def test_gae_truncation_bootstraps_from_the_final_observation_only() -> None:
    rewards, values = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0], [20.0], [30.0]])
    discounts, traces = torch.full((3, 1), 0.5), torch.tensor([[1.0], [0.0], [1.0]])
    advantages = gae(rewards, values, torch.tensor([[20.0], [100.0], [40.0]]), discounts, traces)
    # The time limit's observation is worth 100: 2 + 50 - 20 = 32;  1 + 10 - 10 + 32 / 2 = 17
    assert advantages.flatten().tolist() == [17.0, 32.0, -7.0]


def test_discounted_returns_by_hand() -> None:
    rewards, discounts = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.5], [0.0], [0.5]])
    returns = discounted_returns(rewards, discounts, torch.tensor([8.0]))
    assert returns.flatten().tolist() == [2.0, 2.0, 7.0]


def test_vtrace_by_hand() -> None:
    # One step, rho = 2, delta = 1 + 0.5 * 4 - 1 = 2.
    log_rho, one = torch.tensor([[2.0]]).log(), torch.ones(1, 1)
    targets, advantages = vtrace(log_rho, one, one, 4 * one, 0.5, 1.0, clip_rho=1.5, clip_pg_rho=None)
    assert targets.item() == pytest.approx(1 + 1.5 * 2)
    assert advantages.item() == pytest.approx(2 * 2)


def test_vtrace_ignores_actions_of_probability_zero() -> None:
    rows = without(trajectory(3, 1), "discounts", "traces")
    targets, advantages = vtrace(torch.tensor([[0.0], [-torch.inf], [0.0]]), **rows, discounts=0.9, traces=1.0)
    assert targets[1] == rows["values"][1]
    assert advantages[1] == 0


def test_vtrace_clips_importance_ratios_that_overflow() -> None:
    rows = without(trajectory(3, 1), "discounts", "traces")
    results = [vtrace(torch.full((3, 1), x), **rows, discounts=0.9, traces=1.0) for x in (1000.0, 1.0)]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    rows = trajectory(200, 2, dtype=dtype)
    expected = gae(**{name: row.float() for name, row in rows.items()})
    assert gae(**rows).dtype == torch.float32
    assert torch.equal(gae(**rows), expected)
    assert vtrace(torch.zeros_like(rows["rewards"]), **rows).targets.dtype == torch.float32


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_results_have_no_gradient(mode: type) -> None:
    rows = {name: row.requires_grad_() for name, row in trajectory(6, 2).items()}
    with mode():
        results = [
            reverse_scan(rows["rewards"], rows["discounts"], rows["values"][0]),
            gae(**rows),
            td_lambda_returns(**without(rows, "values")),
            discounted_returns(rows["rewards"], rows["discounts"], rows["values"][0]),
            *vtrace(rows["values"], **rows),
        ]
    assert not any(result.requires_grad for result in results)


# -- identities


def test_td_lambda_is_gae_plus_values() -> None:
    rows = trajectory(40, 5)
    torch.testing.assert_close(td_lambda_returns(**without(rows, "values")), gae(**rows) + rows["values"], **EXACT)


@pytest.mark.parametrize("clips", [(1.0, 1.0, 1.0), (2.0, 1.5, 3.0), (None, None, None)])
def test_vtrace_on_policy_is_gae_plus_values(clips: tuple[float | None, ...]) -> None:
    rows = trajectory(40, 5)
    targets, _ = vtrace(0 * rows["rewards"], *rows.values(), *clips)
    torch.testing.assert_close(targets, gae(**rows) + rows["values"], **EXACT)


def test_vtrace_on_policy_with_lambda_one_has_the_advantages_of_gae() -> None:
    rows = trajectory(40, 5)
    rows["traces"] = (rows["traces"] > 0).double()
    torch.testing.assert_close(vtrace(0 * rows["rewards"], **rows).advantages, gae(**rows), **EXACT)


def test_lambda_zero_is_one_step_and_lambda_one_is_the_discounted_return() -> None:
    rows = trajectory(20, 3)
    rewards, next_values, discounts = rows["rewards"], rows["next_values"], rows["discounts"]
    one_step = rewards + discounts * next_values
    torch.testing.assert_close(td_lambda_returns(rewards, next_values, discounts, 0.0), one_step, **EXACT)
    full = discounted_returns(rewards, discounts, next_values[-1])
    torch.testing.assert_close(td_lambda_returns(rewards, next_values, discounts, 1.0), full, **EXACT)


@pytest.mark.parametrize("lambda_", [0.0, 0.95, 1.0])
def test_truncation_keeps_exact_values_of_a_constant_reward(lambda_: float) -> None:
    gamma, worth = 0.9, torch.full((50, 1), 10.0, dtype=torch.float64)
    traces = torch.full_like(worth, lambda_)
    traces[[7, 8, 30, 49]] = 0
    ones = torch.ones_like(worth)
    torch.testing.assert_close(gae(ones, worth, worth, gamma, traces), 0 * ones, **EXACT)
    torch.testing.assert_close(td_lambda_returns(ones, worth, gamma, traces), worth, **EXACT)


def test_values_of_a_constant_reward_converge_despite_truncation() -> None:
    gamma, values = 0.9, torch.zeros(20, 1, dtype=torch.float64)
    traces = torch.full_like(values, 0.95)
    traces[[4, 9, 14, 19]] = 0  # the time limit; all states are equal
    for _ in range(200):
        values = td_lambda_returns(torch.ones_like(values), values.mean().expand(20, 1), gamma, traces)
    torch.testing.assert_close(values, torch.full_like(values, 1 / (1 - gamma)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_returns_do_not_leak_across_episode_ends(kind: str) -> None:
    rows, end = trajectory(12, 2), 5
    rows["traces"][end] = 0
    if kind == "terminated":
        rows["discounts"][end] = 0
    log_rhos = log_rhos_like(rows["rewards"])

    def everything(rows: dict[str, Tensor], log_rhos: Tensor) -> Tensor:
        returns = [gae(**rows), td_lambda_returns(**without(rows, "values")), *vtrace(log_rhos, **rows)]
        if kind == "terminated":
            returns.append(discounted_returns(rows["rewards"], rows["discounts"], rows["next_values"][-1]))
        return torch.stack(returns)

    before = everything(rows, log_rhos)
    changed = {name: row.clone() for name, row in rows.items()}
    for name, change in [("rewards", 1e6), ("values", 2e6), ("next_values", 4e6)]:
        changed[name][end + 1 :] += change
    after = everything(changed, log_rhos + torch.arange(12).gt(end)[:, None])
    assert torch.equal(before[:, : end + 1], after[:, : end + 1])
    assert not torch.isclose(before[:, end + 1 :], after[:, end + 1 :]).any()


# -- errors


def test_wrong_shapes_raise_with_the_argument_name() -> None:
    x = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"values has shape \[4, 1\], expected \[4, 4\] like rewards"):
        gae(x, x[:, :1], x, x, x)
    with pytest.raises(ValueError, match=r"next_values has shape \[5, 4\], expected \[4, 4\]"):
        td_lambda_returns(x, torch.zeros(5, 4), x, x)
    with pytest.raises(ValueError, match=r"traces has shape \[4, 4, 1\], expected \[4, 4\]"):
        gae(x, x, x, x, x[..., None])
    with pytest.raises(ValueError, match=r"discounts has shape \[3, 4\]"):
        discounted_returns(x, torch.zeros(3, 4), x[0])
    # `[T]` would be taken for `[B]`.
    for function, inputs in [(td_lambda_returns, (x, x)), (gae, (x, x, x)), (vtrace, (x, x, x, x))]:
        for name, last in (("discounts", (x[0], x)), ("traces", (x, x[0]))):
            with pytest.raises(ValueError, match=rf"{name} has shape \[4\], expected \[4, 4\]"):
                function(*inputs, *last)
    for function, inputs in [(gae, (x, x, x[:, :1])), (vtrace, (x, x, x, x[:, :1]))]:
        with pytest.raises(ValueError, match=r"next_values has shape \[4, 1\], expected \[4, 4\]"):
            function(*inputs, x, x)
    with pytest.raises(ValueError, match=r"bootstrap has shape \[\], expected \[4\]"):
        discounted_returns(x, x, torch.tensor(0.0))
    with pytest.raises(ValueError, match=r"log_rhos has shape \[4\], expected \[4, 4\]"):
        vtrace(x[0], x, x, x, x, x)


@pytest.mark.parametrize("name", ["clip_rho", "clip_c", "clip_pg_rho"])
def test_vtrace_raises_on_a_negative_clip(name: str) -> None:
    x = torch.zeros(2, 1)
    with pytest.raises(ValueError, match=rf"{name} is -1.0, expected a number >= 0"):
        vtrace(x, x, x, x, x, x, **{name: -1.0})
