"""Gymnasium's vectorized CartPole."""

import numpy as np
import pytest

from lightning_rl.environments import EnvironmentFailure
from tests.probes import make_batch


@pytest.mark.parametrize("wrong", [2, -1])
def test_invalid_action_is_named_by_the_vectorized_environment(wrong: int) -> None:
    environments = make_batch("CartPole-v1", 3, backend="native")
    environments.reset()
    environments.step(np.array([0, 1, 0]))
    with pytest.raises(EnvironmentFailure, match=r"raised in step: AssertionError: array\(\[ ?0, +1, +-?\d\]\)"):
        environments.step(np.array([0, 1, wrong]))
    environments.close()
