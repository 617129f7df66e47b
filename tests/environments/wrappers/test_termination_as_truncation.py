"""A wrapper that reports terminations as truncations."""

import pytest
import torch

from tests.helpers import make_data, make_model, make_trainer

WRAPPER = "lightning_rl.environments.TerminationAsTruncation"


def test_terminations_become_truncations_and_bootstrap():
    """Episodes of three steps that end in a terminal state; the value of each observation is known."""
    counter = {"lengths": [3], "ends": ["terminated"], "reward": 1.0}
    for wrappers in ([], [WRAPPER]):
        data = make_data("tests.probes:Probe/Counter-v0", env={"kwargs": counter, "wrappers": wrappers}, num_envs=1)
        model = make_model(data)
        seen = []

        def training_step(rollout, batch_idx, model=model, seen=seen):
            seen.append((rollout.terminated.sum(), rollout.truncated.sum(), rollout.next_values[2, 0].clone()))
            reached = torch.tensor([[0.0, 3.0]])
            seen.append(model.policy.value(reached).detach()[0])
            type(model).training_step(model, rollout, batch_idx)

        model.training_step = training_step
        make_trainer(limit_train_batches=1).fit(model, data)
        (terminated, truncated, next_value), value = seen
        assert (terminated, truncated) == ((0, 5) if wrappers else (5, 0))
        assert next_value == pytest.approx(value.item() if wrappers else 0, rel=1e-5)
