"""Both phases of PPG against the numbers of its authors' implementation; see tests/vectors/README.md."""

from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl import PPG, Batch, Rollout
from tests.helpers import FixedRollouts, Recorder, make_trainer, merged
from tests.vectors.load import load

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

OPENAI = load("ppg_vtrace/openai_ppg")
ARCHITECTURES = {"dual": "dual", "shared": "shared", "detach": "detached"}
NAMES = {
    "pi_enc.l": "actor_encoder.linear",
    "vf_enc.l": "critic_encoder.linear",
    "pi_head": "action_head.logits",
    "vf_vhead": "value_head",
    "pi_vhead": "value_head",
    "aux_vf_head": "auxiliary_head",
}
OBSERVATIONS, ACTIONS = spaces.Box(-9, 9, (4,)), spaces.Discrete(3)


class Encoder(nn.Module):
    """One layer, as theirs."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        self.linear = nn.Linear(space.shape[0], 5)
        self.out_features = 5

    def forward(self, observations: Tensor) -> Tensor:
        return self.linear(observations).tanh()


class AuxiliaryPhaseOnly(PPG):
    """Learns from what is in the memory."""

    def update(self, rollout: Rollout) -> None:
        self.auxiliary_phase()


def double(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def load_weights(model: PPG, weights: dict[str, Any]) -> None:
    state = {own(name): double(numbers) for name, numbers in weights.items()}
    assert model.double().policy.load_state_dict(state, strict=False).unexpected_keys == []


def own(name: str) -> str:
    module, _, parameter = name.rpartition(".")
    return f"{NAMES[module]}.{parameter}"


def make(algorithm: type[PPG], arch: str, **options: Any) -> PPG:
    encoder = {"class_path": f"{__name__}.Encoder"}
    given = {"policy": {"network": encoder}, "optimizer": {"name": "torch.optim.Adam"}}
    return algorithm(OBSERVATIONS, ACTIONS, architecture=ARCHITECTURES[arch], **merged(given, options))


@pytest.mark.parametrize("case", OPENAI["aux_phase"], ids=lambda case: case["arch"])
def test_openai_auxiliary_phase(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    num_segments, (num_envs, length) = len(case["segs"]), (3, 6)
    size = case["epochs"][0]["mbsize"]
    model = make(
        AuxiliaryPhaseOnly,
        case["arch"],
        num_policy_iterations=num_segments,
        num_aux_epochs=len(case["epochs"]),
        num_aux_minibatches=num_segments * num_envs // size,
        aux_sequences=True,
        learning_rate=case["lr"],
    )
    load_weights(model, case["weights_at_sleep"])
    for segment, outputs in zip(case["segs"], case["presleep"], strict=True):
        observations, returns = double(segment["ob"]).transpose(0, 1), double(segment["vtarg"]).T
        assert returns.shape == (length, num_envs)
        model.kept.append({"observations": observations, "returns": returns, "values": torch.zeros_like(returns)})
        with torch.no_grad():
            distribution, _ = model.policy(observations)
        close(distribution.log_probs.transpose(0, 1), double(outputs["oldlogits"]).log_softmax(-1), 1e-6)  # float32
    orders = iter([[num_envs * seg + env for env, seg in epoch["env_seg_order"]] for epoch in case["epochs"]])
    monkeypatch.setattr(model, "minibatch_order", lambda num_rows: torch.tensor(next(orders)))
    recorder = Recorder()
    # The argument is not used.
    make_trainer(precision="64-true", callbacks=[recorder]).fit(model, FixedRollouts([empty_rollout()], model))
    assert next(orders, None) is None
    parameters = dict(model.policy.named_parameters())
    for name, numbers in case["weights_after"].items():
        close(parameters[own(name)].detach(), double(numbers), 1e-9)
    for name, theirs in {"head_loss": "vf_aux", "cloning_loss": "pol_distance", "value_loss": "vf_true"}.items():
        losses = [number for key, number in case["losses"] if key == f"unscaled/{theirs}"]
        assert recorder.rows[0][f"aux_{name}"] == pytest.approx(sum(losses) / len(losses), rel=1e-9)


def empty_rollout() -> Rollout:
    """A rollout that only has a shape."""
    zeros, no = torch.zeros(6, 3, dtype=torch.float64), torch.zeros(6, 3, dtype=torch.bool)
    return Rollout(
        observations=torch.zeros(7, 3, 4, dtype=torch.float64),
        actions=torch.zeros(6, 3, dtype=torch.int64),
        rewards=zeros,
        terminated=no,
        truncated=no,
        log_probs=zeros,
        values=zeros,
        next_values=zeros,
        final_indices=torch.zeros(0, 2, dtype=torch.int64),
        final_observations=torch.zeros(0, 4, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    "case", OPENAI["ppo_compute_losses"]["cases"], ids=lambda case: f"{case['arch']}-{case['clip_param']}"
)
def test_openai_policy_phase(case: dict[str, Any]) -> None:
    options = {
        "clip_range": case["clip_param"] or None,
        "entropy_coef": case["entcoef"],
        "value_coef": 2 * case["vfcoef"],
    }
    options["kl_penalty_coef"] = case["kl_penalty"]
    model = make(PPG, case["arch"], num_minibatches=1, **options)
    load_weights(model, case["weights"])
    data = OPENAI["ppo_compute_losses"]["data"][case["arch"]]
    fields = {"observations": "ob", "actions": "ac", "log_probs": "logp", "advantages": "adv", "returns": "vtarg"}
    batch = Batch({ours: double(data[theirs]).flatten(0, 1) for ours, theirs in fields.items()})
    batch = batch.replace(actions=batch.actions.long(), values=batch.returns)
    loss = model.loss(batch)
    loss.total.backward()
    expected = case["diags"]
    assert loss.total.item() == pytest.approx(case["pi"] + case["vf"], rel=1e-7)
    means = {name: x.item() for name, x in (loss.metrics | loss.observed).items()}
    assert means["policy_loss"] == pytest.approx(expected["pg"], rel=1e-7)
    assert means["entropy"] == pytest.approx(expected["entropy"], rel=1e-7)
    assert means.get("kl_penalty", 0.0) == pytest.approx(expected["pi_kl"], rel=1e-7)
    if case["clip_param"]:
        assert means["clip_fraction"] == pytest.approx(expected["clipfrac"], rel=1e-6)
    parameters = dict(model.policy.named_parameters())
    for name, numbers in case["grads"].items():
        gradient = parameters[own(name)].grad
        assert gradient is not None
        close(gradient, double(numbers), 1e-8)
    assert model.policy.auxiliary_head.weight.grad is None


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
