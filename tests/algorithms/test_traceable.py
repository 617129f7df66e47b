"""`loss(batch)` is one graph for PyTorch's compiler, for every algorithm without memory."""

from typing import Any

import pytest
import torch

import lightning_rl
from lightning_rl import OnPolicyAlgorithm
from tests.helpers import CONTINUOUS, DISCRETE, VECTOR, merged, random_rollout

CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "ppo": ("PPO", DISCRETE, {"entropy_coef": 0.1, "target_kl": 0.1}),
    "ppo_options": (
        "PPO",
        CONTINUOUS,
        {
            "normalization": {"values": "popart", "observations": True},
            "clipping": {"dual": 3.0},
            "optimizer": {"l2": {"policy": 1e-3}},
        },
    ),
    "a2c": ("A2C", DISCRETE, {}),
    "vmpo": ("VMPO", DISCRETE, {}),
    "ppo_kl": ("PPOKLPenalty", CONTINUOUS, {}),
    "tf_agents": ("TFAgentsPPO", CONTINUOUS, {}),
    "ppg": ("PPG", DISCRETE, {}),
    "off_policy_ppg": ("OffPolicyPPG", DISCRETE, {}),
    "impala": ("IMPALA", DISCRETE, {}),
    "clear": ("CLEAR", CONTINUOUS, {}),
    "behaviour_cloning": ("BehaviourCloning", DISCRETE, {}),
    "critic_pretraining": ("CriticPretraining", DISCRETE, {}),
    "overlapped": ("OverlappedPPO", DISCRETE, {}),
}


def gradients(model: OnPolicyAlgorithm, loss: Any) -> list[torch.Tensor | None]:
    model.zero_grad()
    loss.total.backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_traced_as_one_graph_with_the_same_numbers(case):
    name, space, options = CASES[case]
    torch.manual_seed(0)
    model: OnPolicyAlgorithm = getattr(lightning_rl, name)(
        VECTOR, space, **merged({"policy": {"hidden_sizes": (8,)}}, options)
    )
    batch = model.batch(random_rollout(model.policy))
    torch.compiler.reset()
    traced = torch.compile(model.loss, fullgraph=True, backend="eager")(batch)
    found, expected = gradients(model, traced), gradients(model, eager := model.loss(batch))
    for metric, value in (eager.metrics | eager.observed).items():
        torch.testing.assert_close((traced.metrics | traced.observed)[metric], value)
    assert [x is None for x in found] == [x is None for x in expected]
    for x, y in zip(found, expected, strict=True):
        if x is not None:
            torch.testing.assert_close(x, y)
