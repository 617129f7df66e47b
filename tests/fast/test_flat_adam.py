"""Adam on vectors does what Adam does, whatever happens to parameters and state in between."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer

from lightning_rl.fast import FastEngine, FlatAdam
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.training.gradient_steps import scale_to_norm, total_norm
from lightning_rl.training.warning_filters import filter_misleading_warnings
from tests.helpers import DISCRETE, VECTOR

gradients_of = FastEngine().gradients

OPTIONS: dict[str, Any] = {"lr": 0.01, "eps": 1e-5, "fused": True}


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))  # sizes that no vector register divides


def learn(network: nn.Sequential, optimizer: Optimizer, steps: int = 3, part: slice = slice(None)) -> None:
    """Take clipped steps; with a `part` of the layers, the others get no gradient."""
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.linspace(-1, 2, 12, dtype=network[0].weight.dtype).view(4, 3) + step  # type: ignore[arg-type]
        outputs = network[part](inputs)
        (outputs - step).square().mean().backward()
        gradients = gradients_of(optimizer)
        scale_to_norm(gradients, 0.5, total_norm(gradients))
        # Both ways to a step, one after the other.
        (optimizer.step_alone if isinstance(optimizer, FlatAdam) and step % 2 else optimizer.step)()


def assert_same(one: tuple[nn.Module, Optimizer], other: tuple[nn.Module, Optimizer]) -> None:
    torch.testing.assert_close(one[0].state_dict(), other[0].state_dict(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(one[1].state_dict()["state"], other[1].state_dict()["state"], rtol=1e-5, atol=1e-7)


def pair(**options: Any) -> list[tuple[nn.Sequential, Optimizer]]:
    """The same network under both classes; `options` are of the second layer's parameters."""
    made: list[tuple[nn.Sequential, Optimizer]] = []
    for kind in (FlatAdam, Adam):
        network = make_network()
        groups = [{"params": network[0].parameters()}, {"params": network[2].parameters(), **options}]
        made.append((network, kind(groups if options else network.parameters(), **OPTIONS)))
    return made


def test_steps_equal_adam_on_one_vector_per_group_or_on_none():
    for options, vectors in (({}, 1), ({"weight_decay": 0.1}, 2), ({"amsgrad": True}, 4), ({"fused": False}, 4)):
        ours, adams = pair(**options)
        learn(*ours)
        learn(*adams)
        assert_same(ours, adams)
        assert len(gradients_of(ours[1])) == vectors


def test_gradients_of_parameters_are_views_of_the_vector():
    ours, adams = pair()
    for network, optimizer in (ours, adams):
        network(torch.ones(1, 3)).sum().backward()
        norm = total_norm(gradients_of(optimizer))
        torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in network.parameters()]))  # type: ignore[misc]
        network[0].weight.grad.mul_(-2)  # type: ignore[union-attr, operator]
        optimizer.step()
    assert_same(ours, adams)


@pytest.mark.parametrize("first", [slice(0, 1), slice(None)])
def test_parameters_without_gradient_do_not_change(first):
    ours, adams = pair()
    for made in (ours, adams):
        learn(*made, part=first)
        learn(*made, part=slice(0, 1))
        learn(*made)
    assert_same(ours, adams)
    steps = [float(state["step"]) for state in ours[1].state.values()]
    assert steps == [9, 9, *([3, 3] if first.stop else [6, 6])]


def test_steps_after_a_missing_gradient_equal_the_steps_of_a_resumed_run_bit_for_bit():
    whole, resumed = (pair(weight_decay=0.1)[0] for _ in range(2))
    learn(*whole)
    learn(*whole, part=slice(0, 1))
    for one, other in zip(whole, resumed, strict=True):
        other.load_state_dict(copy.deepcopy(one.state_dict()))  # type: ignore[attr-defined]
    for made in (whole, resumed):
        learn(*made)
        assert len(gradients_of(made[1])) == 2  # one vector per group
    assert all(map(torch.equal, whole[0].parameters(), resumed[0].parameters()))


def to_double(network: nn.Module, optimizer: Optimizer) -> None:
    network.double()
    for state in optimizer.state.values():
        state |= {name: x.double() for name, x in state.items() if name != "step"}


def put_elsewhere(network: nn.Module, optimizer: Optimizer) -> None:
    for parameter in network.parameters():
        parameter.data = parameter.data * 2


def reload(network: nn.Module, optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def clear(network: nn.Module, optimizer: Optimizer) -> None:
    states = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(states)


def test_gradient_that_is_replaced_before_the_step_is_used():
    ours, adams = pair()
    for network, optimizer in (ours, adams):
        learn(network, optimizer, 1)
        assert gradients_of(optimizer)
        network[0].weight.grad = torch.ones_like(network[0].weight)  # type: ignore[union-attr, arg-type]
        (optimizer.step_alone if isinstance(optimizer, FlatAdam) else optimizer.step)()
    assert_same(ours, adams)


@pytest.mark.parametrize("other", [torch.ones(2, dtype=torch.float64), torch.ones(2, 3).t()], ids=["dtype", "layout"])
def test_parameters_of_two_dtypes_or_layouts_are_trained_as_by_adam(other):
    trained = []
    for kind in (FlatAdam, Adam):
        parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(other.clone())]
        optimizer = kind(parameters, **OPTIONS)
        for step in (1, 2):
            for parameter in parameters:
                parameter.grad = step * torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
            optimizer.step()
        trained.append(parameters)
    torch.testing.assert_close(*trained)


def test_parameters_of_a_group_that_is_added_later_are_trained():
    ours, adams = pair()
    for network, optimizer in (ours, adams):
        learn(network, optimizer)
        network.add_module("3", nn.Linear(2, 2))
        torch.manual_seed(1)
        network[3].reset_parameters()  # type: ignore[operator]
        optimizer.add_param_group({"params": network[3].parameters()})
        learn(network, optimizer)
    assert_same(ours, adams)


@pytest.mark.parametrize("happens", [to_double, put_elsewhere, reload, clear])
def test_replaced_parameters_or_state_are_detected(happens: Callable[[nn.Module, Optimizer], None]):
    ours, adams = pair()
    for made in (ours, adams):
        learn(*made)
        happens(*made)
        learn(*made)
    assert_same(ours, adams)
    assert len(gradients_of(ours[1])) == 1


def test_options_of_a_loaded_state_dict_take_effect():
    """Also if the state dict is not a copy, so that the moments stay the same tensors."""
    ours, adams = pair()
    for network, optimizer in (ours, adams):
        learn(network, optimizer)
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 1e-4
        optimizer.load_state_dict(state)
        learn(network, optimizer)
    assert_same(ours, adams)


@pytest.mark.parametrize("kinds", [(FlatAdam, Adam), (Adam, FlatAdam), (FlatAdam, FlatAdam)])
def test_state_dict_is_compatible_with_adam(kinds):
    whole, _ = pair()
    learn(*whole, steps=3)
    learn(*whole, steps=3)
    network = make_network()
    optimizer = kinds[0](network.parameters(), **OPTIONS)
    learn(network, optimizer)
    network, state = copy.deepcopy(network), copy.deepcopy(optimizer.state_dict())
    optimizer = kinds[1](network.parameters(), **OPTIONS)
    optimizer.load_state_dict(state)
    learn(network, optimizer)
    assert_same((network, optimizer), whole)
    if kinds[0] is kinds[1]:  # bit for bit
        assert all(torch.equal(x, y) for x, y in zip(network.parameters(), whole[0].parameters(), strict=True))


def test_steps_are_counted_in_float32_whatever_the_default_dtype():
    """The kernel for GPUs reads float32, as Adam's own count is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        network = make_network()
        optimizer = FlatAdam(network.parameters(), **OPTIONS)
        learn(network, optimizer)
    finally:
        torch.set_default_dtype(before)
    assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float32}


def test_deep_copies_are_independent():
    (network, optimizer), adams = pair()
    learn(network, optimizer)
    other_network, other = copy.deepcopy((network, optimizer))
    learn(network, optimizer)
    learn(other_network, other)
    assert_same((network, optimizer), (other_network, other))
    learn(*adams, steps=3)
    learn(*adams, steps=3)
    assert_same((network, optimizer), adams)


def test_hooks_around_a_step_are_called_once():
    ours, _ = pair()
    calls: list[str] = []
    ours[1].register_step_pre_hook(lambda *_: calls.append("before"))
    ours[1].register_step_post_hook(lambda *_: calls.append("after"))
    learn(*ours, steps=2)
    assert calls == ["before", "after"] * 2


def test_hooks_and_schedulers_see_every_step():
    (network, optimizer), _ = pair()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    learn(network, optimizer, steps=1)
    with torch.profiler.profile() as profile:
        learn(network, optimizer, steps=1)
    scheduler.step()  # would warn if it had seen no step
    assert "Optimizer.step#FlatAdam.step" in {event.name for event in profile.events()}


def test_step_is_skipped_if_the_gradient_scaler_found_inf():
    ours, adams = pair()
    for network, optimizer in (ours, adams):
        learn(network, optimizer)
        optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None  # type: ignore[attr-defined]
        learn(network, optimizer)
        optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        learn(network, optimizer)
    assert_same(ours, adams)
    assert float(ours[1].state[ours[0][0].weight]["step"]) == 6


def test_large_groups_use_steps_of_adam(monkeypatch):
    monkeypatch.setattr("lightning_rl.fast.flat_adam._MOST_ENTRIES", 31)  # of the 32 there are
    ours, adams = pair()
    learn(*ours)
    learn(*adams)
    assert_same(ours, adams)
    assert len(gradients_of(ours[1])) == 4


def test_nan_gradient_does_not_contaminate_later_steps():
    (network, optimizer), _ = pair()
    learn(network, optimizer)
    network(torch.full((1, 3), torch.nan)).sum().backward()
    gradients = gradients_of(optimizer)
    scale_to_norm(gradients, 0.5, total_norm(gradients))
    learn(network, optimizer)
    assert all(parameter.isfinite().all() for parameter in network.parameters())


def test_weights_of_an_lstm_in_the_vector_do_not_warn_on_a_gpu():
    policy = ActorCritic(VECTOR, DISCRETE, memory="lstm")
    optimizer = FlatAdam(policy.parameters(), fused=True)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert optimizer.vectors()
    assert policy.actor_core.rnn.weight_ih_l0.storage_offset()  # cuDNN's own vector would begin here
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        filter_misleading_warnings()
        warnings.warn("RNN module weights are not part of single contiguous chunk of memory. This means", stacklevel=1)
    assert not seen
