"""`loss(batch)` is one graph for PyTorch's compiler, for every algorithm without memory, and is learned from alike."""

from typing import Any

import pytest
import torch
from gymnasium import spaces

import lightning_rl
from lightning_rl import OnPolicyAlgorithm, fast
from tests.helpers import CONTINUOUS, DISCRETE, VECTOR, FixedRollouts, make_trainer, merged, random_rollout

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "ppo": ("PPO", DISCRETE, {"entropy_coef": 0.1, "target_kl": 0.1}),
    "ppo_options": (
        "PPO",
        CONTINUOUS,
        {
            "normalization": {"values": "popart", "observations": True},
            "clipping": {"dual": 3.0},
            "optimizer": {"l2": {"policy": 1e-3}, "critic": {"learning_rate": 1e-3}, "max_grad_value": 0.1},
        },
    ),
    "ppo_multi_discrete": (
        "PPO",
        spaces.MultiDiscrete([2, 3]),
        {"entropy_coef": 0.1, "optimizer": {"num_value_epochs": 2}, "num_epochs": 1},
    ),
    "ppo_squashed": (
        "PPO",
        CONTINUOUS,
        {"entropy_coef": 0.1, "policy": {"action_distribution": "squashed_gaussian"}},
    ),
    "ppo_beta": ("PPO", CONTINUOUS, {"entropy_coef": 0.1, "policy": {"action_distribution": "beta"}}),
    "ppo_composite": (
        "PPO",
        spaces.Dict({"move": CONTINUOUS, "press": spaces.MultiBinary(2)}),
        {"entropy_coef": 0.1},
    ),
    "a2c": ("A2C", DISCRETE, {}),
    "vmpo": ("VMPO", DISCRETE, {}),
    "ppo_kl": ("PPOKLPenalty", CONTINUOUS, {}),
    "tf_agents": ("TFAgentsPPO", CONTINUOUS, {}),
    "ppg": ("PPG", DISCRETE, {"num_policy_iterations": 2, "num_aux_epochs": 1}),
    "off_policy_ppg": ("OffPolicyPPG", DISCRETE, {"batch_size": 4, "num_policy_iterations": 4, "num_aux_epochs": 1}),
    "impala": ("IMPALA", DISCRETE, {}),
    "clear": ("CLEAR", CONTINUOUS, {}),
    "behaviour_cloning": ("BehaviourCloning", DISCRETE, {}),
    "critic_pretraining": ("CriticPretraining", DISCRETE, {}),
    "critic_pretraining_sum": ("CriticPretraining", DISCRETE, {"reduction": "sum"}),
    "overlapped": ("OverlappedPPO", DISCRETE, {}),
    "rnd": ("RND", DISCRETE, {}),
    "distillation": ("Distillation", DISCRETE, {"teacher": "teacher.ckpt"}),
}


def learned(case: str, fast_paths: str) -> OnPolicyAlgorithm:
    name, space, options = CASES[case]
    torch.manual_seed(0)
    cls = getattr(lightning_rl, name)
    small = {"policy": {"hidden_sizes": (8,)}, "debug": {"fast_paths": fast_paths}}
    model: OnPolicyAlgorithm = cls(VECTOR, space, **merged(small, options))
    rollouts = [random_rollout(model.policy, seed=seed) for seed in range(2)]
    make_trainer(precision="64-true").fit(model, FixedRollouts(rollouts, model))
    return model


@pytest.mark.parametrize("case", CASES)
def test_losses_are_captured_as_one_graph_and_learned_with_the_same_numbers(case, monkeypatch, in_tmp_path):
    """Capture like the compiler, but run the graph without one."""
    if case == "distillation":
        learned("ppo", "none").trainer.save_checkpoint("teacher.ckpt")
    torch.compiler.reset()
    monkeypatch.setattr(fast.programs, "Compiled", lambda function, *_: function)
    compiled, expected = learned(case, "compiled"), learned(case, "none")
    engine: Any = compiled.steps.engine
    assert isinstance(engine, fast.CompiledEngine) and engine.captures and not engine.failed
    assert compiled.losses == pytest.approx(expected.losses, rel=1e-6, abs=1e-9, nan_ok=True)
    assert compiled.trainer.global_step == expected.trainer.global_step > 0
    for found, other in zip(compiled.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("valid", "reduction"), [(False, "mean"), (True, "mean"), (True, "sum")])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("algorithm", ["IMPALA", "CLEAR"])
def test_unrolls_of_any_policy_with_any_number_of_rows_and_ends_share_graphs(
    algorithm, lag, valid, reduction, monkeypatch
):
    torch.compiler.reset()
    monkeypatch.setattr(fast.programs, "Compiled", lambda function, *_: function)
    found = {}
    for fast_paths in ("compiled", "none"):
        torch.manual_seed(0)
        options = {"policy": {"hidden_sizes": (8,)}, "debug": {"fast_paths": fast_paths}, "reduction": reduction}
        model = found[fast_paths] = getattr(lightning_rl, algorithm)(VECTOR, DISCRETE, **options)
        rollouts = [random_rollout(model.policy, seed=seed, valid=valid) for seed in range(9)]
        for version, rollout in enumerate(rollouts):
            rollout.policy_version = version - lag
        make_trainer(precision="64-true").fit(model, FixedRollouts(rollouts, model))
    engine: Any = found["compiled"].steps.engine
    (capture,) = engine.captures.values()
    assert len(capture.graphs) == (1 if algorithm == "IMPALA" else 2) and not engine.failed  # with and without replay
    for one, other in zip(found["compiled"].parameters(), found["none"].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
