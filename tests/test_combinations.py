"""Every kind of observation with every kind of action, with and without masks and memory, in one policy.

All pairs of observations and actions train and play, and the slow tests have them with and without masks and memory; a
sample, in which every kind of observation and of action is, does what else there is.
"""

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_rl import (
    A2C,
    PPG,
    PPO,
    VMPO,
    OffPolicyPPG,
    OnPolicyAlgorithm,
    PPOKLPenalty,
    RolloutDataModule,
    TFAgentsPPO,
)
from tests.checkpointing.test_resume import assert_resumes_from
from tests.combination_probes import ACTIONS, MASKABLE, OBSERVATIONS, SAMPLE, Combination, data_options, model_options
from tests.helpers import Recorder, assert_equal_parameters, make_data, make_trainer, merged, parameters_of
from tests.test_precision import BOUNDS

COMBINATIONS = [
    Combination(observation, action, memory, masked)
    for observation, action, memory, masked in product(OBSERVATIONS, ACTIONS, (False, True), (False, True))
    if action in MASKABLE or not masked
]


def is_always_tried(combination: Combination) -> bool:
    """Every observation with every action; for each of both, in turns, with and without memory and masks."""
    place = list(OBSERVATIONS).index(combination.observation) + list(ACTIONS).index(combination.action)
    turn = place % (4 if combination.action in MASKABLE else 2)
    return (combination.memory, combination.masked) == (turn % 2 == 1, turn >= 2)


every_combination = pytest.mark.parametrize(
    "combination",
    [one if is_always_tried(one) else pytest.param(one, marks=pytest.mark.slow) for one in COMBINATIONS],
    ids=str,
)
sample = pytest.mark.parametrize("combination", SAMPLE, ids=str)
OTHERS: dict[type[OnPolicyAlgorithm], dict[str, Any]] = {
    A2C: {},
    PPG: {"num_policy_iterations": 2},  # an auxiliary phase after two rollouts
    PPOKLPenalty: {},
    VMPO: {"num_epochs": 1},
    # What the preset does by default is for numbers alone, which not all observations have.
    TFAgentsPPO: {"normalization": {"observations": False}},
}


def make(
    combination: Combination,
    algorithm: type[OnPolicyAlgorithm] = PPO,
    data: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[OnPolicyAlgorithm, RolloutDataModule]:
    """An algorithm with the same initial weights each time, and its environments."""
    module = make_data(**merged(data_options(combination), data or {}))
    torch.manual_seed(0)
    passes = {"num_epochs": 1, "num_minibatches": 2} if issubclass(algorithm, PPO) else {}
    spaces = module.observation_space, module.action_space
    return algorithm(*spaces, **merged(passes, model_options(combination), options)), module


def check_training(
    model: OnPolicyAlgorithm, data: RolloutDataModule, bound: float = 1e-6, **trainer_options: Any
) -> Trainer:
    """Two rollouts are on-policy and move every parameter; then two episodes are played."""
    before, recorder = parameters_of(model), Recorder()
    trainer = make_trainer(callbacks=[recorder], limit_val_batches=1, **trainer_options)
    trainer.fit(model, data)
    assert len(recorder.rows) == 2
    assert max(recorder.column("first_ratio_error")) <= bound
    assert trainer.callback_metrics["val/episodes"] == 2
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
    return trainer


def test_what_is_always_tried_has_every_pair_and_each_kind_with_and_without_memory_and_masks():
    tried = [combination for combination in COMBINATIONS if is_always_tried(combination)]
    assert sorted(combination[:2] for combination in tried) == sorted(product(OBSERVATIONS, ACTIONS))
    for kind in ACTIONS:
        found = {combination[2:] for combination in tried if combination.action == kind}
        assert found == set(product((False, True), (False, True) if kind in MASKABLE else (False,)))
    for kind in OBSERVATIONS:
        assert {combination[2:] for combination in tried if combination.observation == kind} == set(
            product((False, True), repeat=2)
        )


def test_the_sample_has_every_kind():
    assert {combination.observation for combination in SAMPLE} == set(OBSERVATIONS)
    assert {combination.action for combination in SAMPLE} == set(ACTIONS)
    assert {combination[2:] for combination in SAMPLE} == set(product((False, True), repeat=2))


@every_combination
def test_it_trains_on_policy_and_plays(combination):
    check_training(*make(combination))


@pytest.mark.parametrize("kind", ["mingru", "gtrxl"])
@pytest.mark.parametrize("combination", [one for one in SAMPLE if one.memory], ids=str)
def test_other_kinds_of_memory_learn_on_policy(combination, kind):
    memory = {"kind": kind, "burn_in": 2, "num_layers": 2} | ({"context_length": 3} if kind == "gtrxl" else {})
    check_training(*make(combination, policy={"memory": memory}))


@sample
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(combination, tmp_path: Path):
    passes = {"num_epochs": 1, "num_minibatches": 2}
    options = {"data": data_options(combination), "model": merged(model_options(combination), passes)}
    assert_resumes_from((2,), "discrete", 4, tmp_path, **options)


@sample
@pytest.mark.parametrize("algorithm", OTHERS)
def test_other_algorithms_take_the_same_policy(combination, algorithm):
    check_training(*make(combination, algorithm, **OTHERS[algorithm]))


@pytest.mark.parametrize("combination", [one for one in SAMPLE if not one.memory], ids=str)
def test_the_one_that_learns_from_old_steps_takes_it_without_memory(combination):
    model, data = make(combination, OffPolicyPPG, batch_size=8, num_policy_iterations=2)
    check_training(model, data, bound=math.inf)


@sample
@pytest.mark.parametrize(
    "options",
    [
        {"normalization": {"values": "popart"}},
        {"optimizer": {"critic": {"learning_rate": 1e-2}}, "policy": {"shared_encoder": False}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_critic_go_with_it(combination, options):
    check_training(*make(combination, **options))


@sample
def test_passes_of_every_kind_go_with_it(combination):
    """Values computed anew, updates that may be taken back, passes of one loss alone."""
    passes = {
        "advantages": {"recompute_advantages": True},
        "clipping": {"rollback": True},
        "optimizer": {"num_value_epochs": 3},
        "target_kl": 1.0,
        "num_epochs": 2,
    }
    check_training(*make(combination, **passes))


@sample
def test_the_previous_action_and_reward_and_normalisers_go_with_it(combination):
    """The previous reward is what there always is to normalise."""
    normalised = {"normalization": {"observations": True, "rewards": True}}
    model, data = make(combination, data={"env": {"previous_action": True, "previous_reward": True}}, **normalised)
    assert {"previous_action", "previous_reward"} <= set(data.observation_space)
    check_training(model, data)
    assert {float(x.moments.count) for x in model.policy.observation_normalizer.leaves.values()} == {2 * 2 * 8}


@sample
def test_it_trains_in_bfloat16(combination):
    check_training(*make(combination), bound=BOUNDS["bf16-mixed"], precision="bf16-mixed")


def test_worker_processes_make_the_same_run():
    """Of the combination that has everything."""
    runs = [make(SAMPLE[-1], data={"backend": backend}) for backend in ("sync", "async")]
    for model, data in runs:
        check_training(model, data)
    assert_equal_parameters(runs[1][0], parameters_of(runs[0][0]))
