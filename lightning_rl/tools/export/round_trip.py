"""An exported program is only written if it acts as the policy does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl.nested import Nested, leaves, map_leaves
from lightning_rl.policies.interface import as_recurrent
from lightning_rl.tools.export.program import DeployedPolicy

TOLERANCE = 1e-5
"""How far numbers of a program may be from those of the policy: absolutely up to 1, relatively above."""
_SEED = 0
Program = Callable[..., Nested]
"""What is called as a `DeployedPolicy` is."""


class RoundTripError(RuntimeError):
    """An exported program does not act as the policy; nothing was written."""


@torch.no_grad()
def check_round_trip(
    name: str,
    program: Program,
    deployed: DeployedPolicy,
    observations: Sequence[Nested],
    action_space: spaces.Space[Any],
    same_random_numbers: bool,
) -> None:
    """Raise unless a program acts as the policy at every step, on all rows and on the first alone.

    Args:
        name: Of the program, for errors.
        program: What was exported.
        deployed: The policy itself, on the CPU.
        observations: Of consecutive steps, each `[B, *shape]`; a memory goes from one to the next.
        action_space: Of one environment.
        same_random_numbers: Whether a seeded program draws the samples that the policy does. Otherwise its samples are
            held to the action space, and its memory to that of the policy.

    Raises:
        RoundTripError: It does not; says where and by how much.
    """
    recurrent = as_recurrent(deployed.policy)
    for rows in {len(next(leaves(observations[0]))), 1}:
        memory = () if recurrent is None else (recurrent.initial_memory(rows, critic=False),)
        for step, batch in enumerate(observations):
            inputs = (map_leaves(lambda x: x[:rows], batch), *memory)  # noqa: B023 - called at once
            found, expected = _seeded(program, inputs), _seeded(deployed, inputs)
            where = f"{name}, step {step} of {len(observations)}, {rows} rows"
            actions = (found, expected) if recurrent is None else (found[0], expected[0])
            if deployed.deterministic or same_random_numbers:
                _compare(where, "action", *actions)
            else:
                _check_samples(where, *actions, action_space)
            if recurrent is not None:
                _compare(where, "memory", found[1], expected[1])
                memory = (expected[1],)


def _seeded(program: Program, inputs: tuple[Nested, ...]) -> Nested:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return program(*inputs)


def _compare(where: str, what: str, found: Nested, expected: Nested) -> None:
    for index, (x, y) in enumerate(zip(leaves(found), leaves(expected), strict=True)):
        _compare_form(where, what, index, x, y)
        far = (x.double() - y.double()).abs() / y.double().abs().clamp(min=1)
        if not bool((far <= TOLERANCE).all()):
            raise RoundTripError(
                f"{where}: {what} {index} is not that of the policy: {far.max().item():.3g} off, expected at most "
                f"{TOLERANCE:g}"
            )


def _compare_form(where: str, what: str, index: int, found: Tensor, expected: Tensor) -> None:
    forms = (found.dtype, tuple(found.shape)), (expected.dtype, tuple(expected.shape))
    if forms[0] != forms[1]:
        raise RoundTripError(f"{where}: {what} {index} is {forms[0]}: expected {forms[1]}")


def _check_samples(where: str, found: Nested, expected: Nested, action_space: spaces.Space[Any]) -> None:
    for index, (x, y) in enumerate(zip(leaves(found), leaves(expected), strict=True)):
        _compare_form(where, "action", index, x, y)
    for row in range(len(next(leaves(found)))):
        action = map_leaves(lambda x: np.asarray(x[row].numpy()), found)  # noqa: B023 - called at once
        action = map_leaves(lambda x: x[()] if x.ndim == 0 else x, action)
        if not action_space.contains(action):
            raise RoundTripError(f"{where}: the action {action} is not in {action_space}")
