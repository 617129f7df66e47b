"""Off-policy PPG: how often which rows are learned from, and as what."""

from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_rl import PPG, OffPolicyPPG, Rollout
from lightning_rl.training.loss import Loss
from lightning_rl.training.minibatches import BatchPair
from lightning_rl.validation import ConfigurationError
from tests.algorithms.ppg_models import REUSED, ROWS, change, fit, learned, make
from tests.helpers import (
    Recorder,
    make_data,
    make_trainer,
    parameters_of,
    random_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def test_off_policy_phases_span_rollouts_and_stop_without_rows() -> None:
    """48 rows that are used once make one batch of 32; the 16 that are left and 48 new ones two."""
    model = make(Counting, policy_max_use=1, policy_buffer_size=128, updates_per_rollout=3)
    recorder = fit(model, 4)
    assert model.counts == [1, 2, 1, 2]
    assert ["aux_head_loss" in row for row in recorder.rows] == [False, True, False, True]


class Counting(OffPolicyPPG):
    """Notes how many iterations each rollout has, and which rows were drawn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drawn: list[dict[str, torch.Tensor]] = []
        self.counts: list[int] = []

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        before = len(self.drawn)
        super().training_step(rollout, batch_idx)
        self.counts.append(len(self.drawn) - before)

    def policy_iteration(self, samples: BatchPair) -> None:
        self.drawn.append({name: batch.observations for name, batch in samples._asdict().items()})
        super().policy_iteration(samples)


def test_every_row_is_drawn_at_most_max_use_times() -> None:
    model = make(Counting, policy_max_use=2, value_max_use=3, updates_per_rollout=9, value_buffer_size=64)
    fit(model, 1)
    for name, limit in (("policy", 2), ("value", 3)):
        rows = torch.cat([drawn[name] for drawn in model.drawn])
        assert rows.unique(dim=0, return_counts=True)[1].max() <= limit
        for drawn in model.drawn:
            assert len(drawn[name].unique(dim=0)) == 32
    assert len(model.sources["policy"]) < 32 or len(model.sources["value"]) < 32


def test_importance_ratios_use_the_policy_that_took_the_action() -> None:
    """The stored log-probabilities give the loss of PPO over other rows."""
    model = make(OffPolicyPPG, policy_max_use=None, policy_buffer_size=ROWS, learning_rate=0.05)
    recorder = fit(model, 3)
    assert max(recorder.column("first_ratio_error")) > 0  # made up by the first parameters
    rows = model.sources["policy"].gather(torch.arange(4))
    expected = random_rollout(make(OffPolicyPPG).policy, seed=2, off_policy=0.0)
    assert any(torch.equal(rows["log_probs"][0], x) for x in expected.log_probs.flatten())


def test_target_kl_stops_an_iteration_but_not_the_next_one() -> None:
    class CountedLosses(OffPolicyPPG):
        def policy_iteration(self, samples: BatchPair) -> None:
            counts.append(0)
            super().policy_iteration(samples)

        def loss_of_both(self, pair: BatchPair) -> Loss:
            counts[-1] += 1
            return super().loss_of_both(pair)

    counts: list[int] = []
    fit(make(CountedLosses, target_kl=1e-4, num_epochs=3, num_minibatches=1, learning_rate=0.05), 1)
    assert counts == [2, 1]


def test_new_rollouts_are_on_policy_in_off_policy_ppg() -> None:
    data = make_data(num_envs=4, rollout_length=16, rollouts_per_epoch=4)
    model = OffPolicyPPG(data.observation_space, data.action_space, **REUSED | {"updates_per_rollout": 4})
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(model, data)
    assert max(recorder.column("first_ratio_error")) <= 1e-6
    assert recorder.rows[3]["value_age"] > 0


def test_batches_contain_the_rollout_that_is_learned_from() -> None:
    """Buffers with room for one rollout have no other steps: batches of a loader would be older."""
    data = make_data(num_envs=4, rollout_length=16, rollouts_per_epoch=3)
    sizes = {"batch_size": 64, "policy_buffer_size": 64, "value_buffer_size": 64}
    model = OffPolicyPPG(data.observation_space, data.action_space, **REUSED | sizes)
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(model, data)
    assert recorder.column("policy_age") == recorder.column("value_age") == [0, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"updates_per_rollout": 1},
        {"batch_size": 16},
        {"policy_buffer_size": 32},
        {"policy_max_use": None},
        {"value_buffer_size": 32},
        {"value_max_use": 1},
        {"num_epochs": 2},
        {"num_minibatches": 1},
        {"optimizer": {"num_value_epochs": 2}},
        {"clipping": {"rollback": True}, "target_kl": 1e-6},
        {"advantages": {"normalize": "rollout"}},
        {"num_policy_iterations": 1},
    ],
    ids=str,
)
def test_every_option_of_off_policy_ppg_changes_the_result(options: dict[str, Any]) -> None:
    fit(model := make(OffPolicyPPG, **options), 4)
    assert change(model, parameters_of(learned(OffPolicyPPG))) > 1e-4


def test_rollouts_with_skipped_updates_are_in_no_buffer() -> None:
    class BrokenRollouts(OffPolicyPPG):
        def training_step(self, rollout: Rollout, batch_idx: int) -> None:
            if self.policy_version == 1:
                rollout.rewards[:] = torch.nan
            super().training_step(rollout, batch_idx)

    model = make(BrokenRollouts, debug={"max_skipped_updates": 1})
    with pytest.warns(UserWarning, match="were skipped"):
        fit(model, 2)
    for buffer in model.sources.values():
        state = buffer.state_dict()
        assert state["fields"]["returns"].isfinite().all()
        assert (state["uses"] >= 0).sum() <= ROWS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates_per_rollout": 0}, r"updates_per_rollout=0 .* an integer of at least 1"),
        ({"batch_size": 0}, r"batch_size=0 .* an integer of at least 1"),
        ({"policy_buffer_size": 31}, r"policy_buffer_size=31 .* at least batch_size=32"),
        ({"value_buffer_size": 0}, r"value_buffer_size=0 .* an integer of at least 1"),
        ({"policy_max_use": 0}, r"policy_max_use=0 .* an integer of at least 1"),
        ({"num_minibatches": 64}, r"num_minibatches=64 .* no more than batch_size=32"),
        ({"policy": {"memory": "lstm"}}, r"policy.memory='lstm' .* None: steps are drawn one by one"),
        (
            {"advantages": {"recompute_advantages": True}},
            r"advantages.recompute_advantages=True .* False: advantages are computed once",
        ),
        ({"aux_sequences": True}, r"aux_sequences=True .* False: auxiliary phases learn from steps"),
    ],
)
def test_invalid_options_of_off_policy_ppg_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(OffPolicyPPG, **options)


def test_largest_advantage_is_logged_before_it_is_normalized() -> None:
    normalized, raw = (make(OffPolicyPPG, advantages={"normalize": kind}) for kind in ("rollout", "none"))
    for model in (normalized, raw):
        fit(model, 1)
    assert normalized.losses["max_abs_advantage"] == raw.losses["max_abs_advantage"] > 0


@pytest.mark.parametrize("kind", [PPG, OffPolicyPPG])
def test_largest_advantage_has_no_sign(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = make(kind), []
    observe = model.observe_rollout

    def negative(batch: Any) -> None:
        seen.append(batch.advantages.abs().max())
        observe(batch.replace(advantages=-batch.advantages.abs()))

    monkeypatch.setattr(model, "observe_rollout", negative)
    fit(model, 1)
    assert model.losses["max_abs_advantage"] == seen[0]


def test_histograms_are_logged_for_the_first_batch_of_a_rollout(tmp_path) -> None:
    model = make(OffPolicyPPG, num_policy_iterations=1, debug={"histograms": True})
    logger: Any = TensorBoardLogger(tmp_path)
    fit(model, 2, logger=logger, log_every_n_steps=1)
    logger.experiment.flush()
    found = EventAccumulator(logger.log_dir, {"histograms": 0}).Reload()
    tags = found.Tags()["histograms"]
    names = [name for name, _ in model.policy.named_parameters()]
    # The auxiliary head has gradients in auxiliary phases alone.
    gradients = [f"gradients/{name}" for name in names if not name.startswith("auxiliary_head")]
    parts = ["actions", "advantages", *(f"parameters/{name}" for name in names), *gradients]
    assert sorted(tags) == sorted(f"update/{part}" for part in parts)
    for tag in tags:
        assert [event.step for event in found.Histograms(tag)] == [0, ROWS], tag
    assert found.Histograms("update/advantages")[-1].histogram_value.num == model.batch_size


def test_memory_for_both_buffers_and_all_batches_of_a_phase_is_checked():
    data = make_data()
    options = {"batch_size": 32, "policy_buffer_size": 64, "value_buffer_size": 96, "num_policy_iterations": 4}
    model = OffPolicyPPG(data.observation_space, data.action_space, aux_memory_gib=1e-7, **options)
    with pytest.raises(ConfigurationError, match=r"^aux_memory_gib=1e-07 .* for 288 steps of 24 bytes"):
        make_trainer().fit(model, data)
