"""IMPALA and CLEAR against a learner of the same kind, on its inputs; see tests/vectors/README.md.

The policy is a table: free logits and values for each cell of `[T + 1, B]`, which observations number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl import CLEAR, IMPALA, OnPolicyAlgorithm, Rollout
from lightning_rl.environments.wrappers.action_repeat import learned_repeat
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.distributions.discrete import Categorical
from lightning_rl.policies.distributions.joint import Joint
from tests.helpers import Recorder, make_trainer
from tests.vectors.load import load

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
AS_IT_IS, RIGHT = load("ppg_vtrace/seed_learner_tf"), load("ppg_vtrace/seed_learner_right")["cases"]
LENGTH, NUM_ENVS = 6, 4
HEADS = {"camera": 4, "move": 3, "step_mul": 5}
OBSERVATIONS = spaces.Discrete((LENGTH + 1) * NUM_ENVS)


def double(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def logits_of(who: str, heads: list[str]) -> dict[str, Tensor]:
    inputs = AS_IT_IS["inputs"][who]
    return {h: double(inputs["step_mul_logits"] if h == "step_mul" else inputs["action_logits"][h]) for h in heads}


class Table(nn.Module):
    """The learner of the vectors: whatever its parameters say at an observation."""

    memory = None

    def __init__(self, heads: list[str]) -> None:
        super().__init__()
        self.logits = nn.ParameterDict(
            {h: nn.Parameter(x.flatten(0, 1)) for h, x in logits_of("learner", heads).items()}
        )
        self.value_table = nn.Parameter(double(AS_IT_IS["inputs"]["learner"]["baseline"]).flatten())

    def forward(self, observations: Tensor) -> tuple[Distribution, Tensor]:
        parts = {head: Categorical(logits[observations]) for head, logits in self.logits.items()}
        return Joint(parts, [*parts]), self.value(observations)

    def value(self, observations: Tensor) -> Tensor:
        return self.value_table[observations]


def rollout_of(columns: slice, heads: list[str]) -> Rollout:
    """What the actors did in some columns: row t + 1 of theirs belongs to observation t."""
    inputs, later = AS_IT_IS["inputs"], (slice(1, None), columns)
    behaviour = inputs["behaviour"]
    acted = {h: behaviour["step_mul"] if h == "step_mul" else behaviour["action"][h] for h in heads}
    actions = {head: torch.tensor(x)[later].squeeze(-1) for head, x in acted.items()}
    taken = Joint({h: Categorical(x[later]) for h, x in logits_of("behaviour", heads).items()}, heads)
    observations = torch.arange(OBSERVATIONS.n).view(LENGTH + 1, NUM_ENVS)[:, columns]
    values = double(behaviour["baseline"])[later]
    terminated = torch.tensor(inputs["done"])[later]
    rollout = Rollout(
        observations=observations,
        actions=actions,
        rewards=double(inputs["reward"])[later],
        terminated=terminated,
        truncated=torch.zeros_like(terminated),
        log_probs=taken.log_prob(actions),
        values=values,
        next_values=torch.zeros_like(values),
        final_indices=torch.zeros(0, 2, dtype=torch.long),
        final_observations=torch.zeros(0, dtype=torch.long),
        policy_version=-1,
    )
    rollout.then = taken.parameters()  # type: ignore[attr-defined]
    return rollout


def make(case: dict[str, Any], kind: type[OnPolicyAlgorithm], **options: Any) -> Any:
    """The learner with the settings of a case."""
    given = case["kwargs"]
    heads = [head for head in HEADS if head != "step_mul" or not given["fixed_step_mul"]]
    clip = given["reward_clipping"]

    class OfTable(kind):  # type: ignore[misc,valid-type]
        def make_policy(self) -> Any:
            return Table(heads)

        def draw(self, num_new: int) -> Tensor:
            return torch.arange(len(self.kept))

    model = OfTable(
        OBSERVATIONS,
        spaces.Dict({head: spaces.Discrete(HEADS[head]) for head in heads}),
        reduction="sum",
        gamma=given["discounting"],
        learning_rate=given["learning_rate"],
        reward_scale=given["reward_scaling"],
        reward_clip=None if clip == "default" else clip,
        optimizer={
            "name": "torch.optim.Adam",
            "options": {"eps": 1e-8},
            "max_grad_norm": given["clip_grad_norm"] if given["clip_grad_norm"] > 0 else None,
        },
        **options,
    )
    return model.double()


class Once:
    """A train loader of one rollout."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Rollout]:
        yield self.rollout


def learn(model: Any, rollout: Rollout) -> dict[str, float]:
    """One step; return what was recorded."""
    recorder = Recorder()
    make_trainer(callbacks=[recorder], precision="64-true").fit(model, Once(rollout))
    return recorder.rows[0]


def gradients_of(model: Any) -> dict[str, Tensor]:
    found = {f"logits/{h}": logits.grad for h, logits in model.policy.logits.items()}
    found["baseline"] = model.policy.value_table.grad
    return {name: x.view(LENGTH + 1, NUM_ENVS, *x.shape[1:]) for name, x in found.items()}


def learn_case(name: str, **options: Any) -> tuple[Any, dict[str, float]]:
    """One step with the replayed columns, the first ones, in the memory."""
    case = AS_IT_IS["learner"][name]
    given = case["kwargs"]
    coefs = {"value_coef": given["baseline_cost"], "entropy_coef": given["entropy_cost"], **options}
    num_replayed = given["batch_size_from_replay"]
    heads = [head for head in HEADS if head != "step_mul" or not given["fixed_step_mul"]]
    if not num_replayed:
        model = make(case, IMPALA, **coefs)
        return model, learn(model, rollout_of(slice(None), heads))
    model = make(
        case,
        CLEAR,
        policy_cloning_coef=given["policy_cloning_cost"],
        value_cloning_coef=given["value_cloning_cost"],
        replay_policy="fifo",
        **coefs,
    )
    replayed = rollout_of(slice(num_replayed), heads)
    model.kept.append(replayed, old_distribution=replayed.then)  # type: ignore[attr-defined]
    new = rollout_of(slice(num_replayed, None), heads)
    if num_replayed == NUM_ENVS:  # nothing new: rows that do not count
        new = rollout_of(slice(1), heads)
        new.valid, new.num_steps = torch.zeros(new.shape, dtype=torch.bool), 0
    return model, learn(model, new)


@pytest.mark.parametrize(
    ("discount", "name"), [("per_repeat", "discount_gamma_pow_steps"), ("per_step", "seed_formula_float64")]
)
def test_discounts_of_chosen_action_repeats_match_the_reference(discount: str, name: str) -> None:
    """Targets by γ^(step_mul + 1), the behaviour's, and by γ for every number of repeats, as in the reference."""
    heads = [*HEADS]
    model = make(AS_IT_IS["learner"]["no_replay"], IMPALA)
    rollout = rollout_of(slice(None), heads)
    if learned_repeat({"max": 5, "discount": discount}).discount == "per_repeat":
        rollout.repeats = rollout.actions["step_mul"] + 1
    steps = model.batch(rollout)
    model.loss(steps)
    found = steps.estimates
    expected = RIGHT["no_replay"][name]
    for own, theirs in ((found.returns, "vs"), (found.advantages, "pg_advantages")):
        torch.testing.assert_close(own.view(LENGTH, NUM_ENVS), double(expected[theirs]), rtol=1e-7, atol=1e-7)


# Nothing but what is asked for may differ: `clip_advantage` of the original changes nothing.
@pytest.mark.parametrize("name", AS_IT_IS["learner"])
def test_losses_gradients_and_step_match_the_reference_in_float64(name: str) -> None:
    model, recorded = learn_case(name)
    expected, case = RIGHT[name]["seed_formula_float64"], AS_IT_IS["learner"][name]
    rows = LENGTH * NUM_ENVS
    sums = {"policy_loss": "policy_gradient", "value_loss": "baseline", "entropy": "entropy"}
    if case["kwargs"]["batch_size_from_replay"]:
        sums |= {"policy_cloning_loss": "policy_cloning", "value_cloning_loss": "value_cloning"}
    for own, theirs in sums.items():
        sign = -1 if own == "entropy" else 1
        assert rows * recorded[own] == pytest.approx(sign * expected[theirs], rel=1e-7), own
    assert recorded["loss"] == pytest.approx(expected["total_loss"], rel=1e-7)
    assert recorded["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-7)
    clipped, limit = gradients_of(model), case["kwargs"]["clip_grad_norm"]
    factor = min(1.0, limit / expected["grad_norm"]) if limit > 0 else 1.0
    for head, gradient in clipped.items():
        wanted = factor * double(expected["grads"][head])
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6)
        # TensorFlow's own step, in float32; Adam makes much of gradients that rounding alone sets apart from 0.
        parameter = (
            model.policy.value_table if head == "baseline" else model.policy.logits[head.removeprefix("logits/")]
        )
        clear = wanted.abs() > 1e-3
        stepped = parameter.detach().view_as(wanted)
        torch.testing.assert_close(stepped[clear], double(case["params_after_adam"][head])[clear], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in RIGHT if "clip_advantage_applied" in RIGHT[n]])
def test_clip_advantage_matches_the_intent_of_the_reference(name: str) -> None:
    expected = RIGHT[name]["clip_advantage_applied"]
    _, recorded = learn_case(name, clip_advantage=True)
    assert LENGTH * NUM_ENVS * recorded["policy_loss"] == pytest.approx(expected["policy_gradient"], rel=1e-7)
    assert recorded["loss"] == pytest.approx(expected["total_loss"], rel=1e-7)
