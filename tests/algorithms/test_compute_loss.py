"""The loss of a rollout without learning from it, and the losses that learning from one gives."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_rl import A2C, IMPALA, PPO, VMPO, OnPolicyAlgorithm, PPOKLPenalty, TFAgentsPPO
from lightning_rl.checkpointing.format import run_state
from lightning_rl.nested import leaves
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    DISCRETE,
    VECTOR,
    FixedRollouts,
    MemoryLogger,
    make_data,
    make_model,
    make_trainer,
    merged,
    random_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

CASES: dict[str, tuple[type[OnPolicyAlgorithm], dict[str, Any]]] = {
    "ppo": (PPO, {"num_epochs": 1, "num_minibatches": 1, "advantages": {"normalize": "rollout"}, "entropy_coef": 0.1}),
    "normalisers_first": (
        PPO,
        {
            "num_epochs": 1,
            "num_minibatches": 1,
            "normalization": {"update": "before", "observations": True, "rewards": True},
            "advantages": {"recompute_values": True},
        },
    ),
    "popart": (PPO, {"num_epochs": 1, "num_minibatches": 1, "normalization": {"values": "popart"}, "target_kl": 1e-4}),
    "kl": (PPOKLPenalty, {"num_epochs": 1, "num_minibatches": 1, "kl_cutoff_coef": 10.0}),
    "tf_agents": (TFAgentsPPO, {"num_epochs": 1, "num_minibatches": 1}),
    "schedule": (A2C, {"entropy_coef": {"kind": "linear", "start": 0.5, "end": 0.1, "over": 100}}),
    "a2c": (A2C, {}),
    "impala": (IMPALA, {}),
}


class InOrder:
    """Minibatches in row order, whose sums equal the sums of the whole batch bit for bit."""

    def minibatch_order(self, num_items: int) -> Tensor:
        return torch.arange(num_items)


def make(case: str, **more: Any) -> Any:
    algorithm, options = CASES[case]
    torch.manual_seed(0)
    made = type("Ordered", (InOrder, algorithm), {})
    return made(VECTOR, DISCRETE, **merged({"policy": {"hidden_sizes": (8,)}}, options, more))


def everything(model: OnPolicyAlgorithm) -> list[Any]:
    """Tensors and numbers of the state that a run resumes from."""
    state = run_state(model)
    gradients = tuple(p.grad for p in model.parameters())
    kept = [model.steps.record, model.losses, model.normalizers.value_targets, model.steps.failed_minibatch]
    return [copy.deepcopy(x) for x in (dict(model.state_dict()), torch.get_rng_state(), str(state), gradients)] + kept


@pytest.mark.parametrize("case", CASES)
def test_compute_loss_changes_nothing_and_equals_the_first_loss_of_the_update(case):
    model = make(case)
    rollouts = [random_rollout(model.policy, seed=seed, valid=seed == 1) for seed in (0, 1)]
    learned: list[dict[str, float]] = []
    computed: list[dict[str, float]] = []

    class Before(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            copied = copy.deepcopy(batch)
            before = everything(pl_module)
            computed.append(pl_module.compute_loss(batch))
            for one, other in zip(before, everything(pl_module), strict=True):
                for x, y in zip(leaves(one), leaves(other), strict=True):
                    assert torch.equal(x, y) if isinstance(x, Tensor) else x is y or x == y
            assert all(torch.equal(x, y) for x, y in zip(tensors(batch), tensors(copied), strict=True))

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            learned.append(outputs["losses"])

    make_trainer(callbacks=[Before()], log_every_n_steps=1).fit(model, FixedRollouts(rollouts, model))
    assert len(learned) == 2
    for loss, of_learning in zip(computed, learned, strict=True):
        assert {"loss", "policy_loss", "value_loss", "entropy"} <= set(loss) < set(of_learning)
        # Learning may compute it in closed form, which rounds otherwise.
        assert loss == pytest.approx({name: of_learning[name] for name in loss}, rel=1e-5, abs=1e-7)
    assert computed[0] != computed[1]


def tensors(rollout: Any) -> list[Tensor]:
    return [x for x in leaves(rollout.tensors()) if isinstance(x, Tensor)]


def test_compute_loss_of_a_loaded_model_has_the_scheduled_options_of_its_step(tmp_path):
    data = make_data()
    model = make_model(data, entropy_coef={"kind": "linear", "start": 0.5, "end": 0.1})
    losses = []

    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")
                loaded = PPO.load_from_checkpoint(tmp_path / "half.ckpt")
                losses.extend(x.compute_loss(batch) for x in (pl_module, loaded))
                assert loaded.entropy_coef == pytest.approx(0.3)  # half of the run is done

    make_trainer(callbacks=[Save()]).fit(model, data)
    assert losses[0] == losses[1]


def test_compute_loss_of_vtrace_algorithms_needs_a_rollout():
    model = make("impala")
    rollout = random_rollout(model.policy)
    assert model.compute_loss(rollout)["loss"] == model.compute_loss(rollout)["loss"]
    with pytest.raises(TypeError, match=r"^compute_loss of Ordered takes a Rollout, not a Batch"):
        model.compute_loss(rollout.flatten())


def test_compute_loss_of_vtrace_algorithms_after_the_step_has_values_of_the_new_policy():
    losses = []

    class Measured(IMPALA):
        def update(self, rollout):
            super().update(rollout)
            losses.append(self.compute_loss(rollout))

    class Again(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(pl_module.compute_loss(batch))

    model = Measured(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}, learning_rate=1e-2)
    make_trainer(callbacks=[Again()]).fit(model, FixedRollouts([random_rollout(model.policy)], model))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("case", [case for case in CASES if case != "impala"])
def test_compute_loss_needs_no_trainer_and_takes_batches(case):
    model = make(case)
    rollout = random_rollout(model.policy)
    whole = model.compute_loss(rollout)
    # Normalisers that are updated first are not yet when `targets` was not asked to.
    batch = copy.deepcopy(model).batch(rollout)
    if case != "normalisers_first":
        of_batch = model.compute_loss(batch)
        assert of_batch == {name: whole[name] for name in of_batch}
        parts = [model.compute_loss(part)["value_loss"] for part in batch.split(2)]
        if "weights" not in batch.fields:
            assert sum(parts) / 2 == pytest.approx(whole["value_loss"], rel=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("case", ["ppo", "normalisers_first", "impala"])
def test_compute_loss_of_several_rollouts_is_their_mean_or_sum(case):
    """Each rollout is computed alone, whatever the others do to the normalizers."""
    model = make(case)
    rollouts = [random_rollout(model.policy, seed=seed, valid=seed == 1) for seed in (0, 1, 2)]
    each = [model.compute_loss(rollout) for rollout in rollouts]
    assert each[0] == model.compute_loss(rollouts[:1]) == model.compute_loss(rollouts[0], "sum")
    means, sums = model.compute_loss(rollouts), model.compute_loss(rollouts, reduction="sum")
    assert means.keys() == sums.keys() == each[0].keys()
    for name in means:
        assert sums[name] == pytest.approx(sum(terms[name] for terms in each), rel=1e-12, abs=1e-12)
        assert means[name] == pytest.approx(sums[name] / 3, rel=1e-12, abs=1e-12)
    with pytest.raises(ConfigurationError, match=r"compute_loss: reduction='max' .* mean or sum"):
        model.compute_loss(rollouts, reduction="max")
    with pytest.raises(ConfigurationError, match=r"compute_loss: rollouts=\[\] .* at least one"):
        model.compute_loss([])


@pytest.mark.parametrize("case", ["ppo", "normalisers_first"])
def test_compute_loss_in_an_update_is_the_loss_of_its_batch(case):
    """Normalizers that are updated first have the rollout already, and get it no second time."""
    terms: list[tuple[dict[str, float], dict[str, float]]] = []
    algorithm, options = CASES[case]

    class Compares(algorithm):
        def update(self, rollout):
            batch, before = self.batch(rollout), copy.deepcopy(self.normalizers.of_rewards)
            terms.append((self.compute_loss(rollout), self.compute_loss(batch)))
            for name, x in () if before is None else before.state_dict().items():
                assert torch.equal(x, self.normalizers.of_rewards.state_dict()[name])
            super().update(rollout)

    model = Compares(VECTOR, DISCRETE, **merged({"policy": {"hidden_sizes": (8,)}}, options))
    rollouts = [random_rollout(model.policy, seed=seed) for seed in (0, 1)]
    make_trainer().fit(model, FixedRollouts(rollouts, model))
    assert len(terms) == 2
    for of_rollout, of_batch in terms:
        assert of_batch == {name: of_rollout[name] for name in of_batch}


@pytest.mark.parametrize("algorithm", [PPOKLPenalty, TFAgentsPPO, VMPO])
def test_a_batch_from_before_the_update_has_the_divergence_from_the_policy_that_acted(algorithm):
    found: list[dict[str, float]] = []

    class Measured(algorithm):
        def update(self, rollout):
            batch = self.batch(rollout)
            super().update(rollout)
            found.extend(self.compute_loss(x) for x in (rollout, batch))

    model = Measured(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}, learning_rate=1e-2)
    make_trainer().fit(model, FixedRollouts([random_rollout(model.policy)], model))
    assert found[0]["kl"] == 0 < found[1]["kl"]


def test_compute_loss_raises_without_a_loss_method():
    class Own(OnPolicyAlgorithm):
        def update(self, rollout):
            self.batch(rollout)

    model = Own(VECTOR, DISCRETE)
    with pytest.raises(NotImplementedError, match=r"Own has no loss\(batch\), which compute_loss calls"):
        model.compute_loss(random_rollout(model.policy))


def test_callbacks_get_the_rollout_and_the_losses_after_each_step():
    data = make_data()
    model = make_model(data)
    seen: list[tuple[Any, dict[str, float]]] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert outputs["losses"] is pl_module.losses
            assert outputs["losses"]["loss"] == pytest.approx(trainer.callback_metrics["train/loss"].item())
            seen.append((batch.policy_version, dict(outputs["losses"])))

    make_trainer(callbacks=[Watch()], log_every_n_steps=1).fit(model, data)
    assert [version for version, _ in seen] == [0, 1]
    assert seen[0][1] != seen[1][1]
    assert all(isinstance(value, float) for _, losses in seen for value in losses.values())


def test_losses_are_logged_as_means_over_the_minibatches_of_all_epochs():
    terms: list[dict[str, float]] = []

    class Watched(PPO):
        def loss(self, batch):
            loss = super().loss(batch)
            sizes = {"total_abs_loss": sum(abs(term.item()) for term in loss.terms), "loss": loss.total.item()}
            terms.append({name: value.item() for name, value in loss.metrics.items()} | sizes)
            return loss

    torch.manual_seed(0)
    options = {"num_epochs": 3, "num_minibatches": 4, "entropy_coef": 0.1, "learning_rate": 1e-2}
    model = Watched(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}, optimizer={"l2": {"policy": 0.01}}, **options)
    logger = MemoryLogger()
    rollouts = FixedRollouts([random_rollout(model.policy)], model)
    make_trainer(logger=logger, log_every_n_steps=1).fit(model, rollouts)
    assert len(terms) == 12
    for name in ("loss", "total_abs_loss", "policy_loss", "value_loss", "entropy", "l2_penalty"):
        values = [update[name] for update in terms]
        assert len(set(values)) > 3, "they change from minibatch to minibatch"
        assert logger.rows(f"train/{name}") == [(48, pytest.approx(sum(values) / 12, rel=1e-6))]
    assert logger.rows("train/learning_rate") == [(48, 1e-2)]
    first = terms[0]
    sizes = abs(first["policy_loss"]) + 0.5 * first["value_loss"] + 0.1 * first["entropy"] + first["l2_penalty"]
    assert first["total_abs_loss"] == pytest.approx(sizes, rel=1e-5)
