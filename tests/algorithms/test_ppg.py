"""PPG phase by phase: what each changes and leaves alone, keeps and logs."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rl import PPG, PPO, Batch, FailedUpdate, Rollout
from lightning_rl.rollouts import batch
from lightning_rl.training.loss import Loss
from lightning_rl.validation import ConfigurationError
from tests.algorithms.ppg_models import HEAD, PHASE, ROWS, SMALL, change, fit, learned, make
from tests.helpers import (
    DISCRETE,
    PIXELS,
    VECTOR,
    FixedRollouts,
    MemoryLogger,
    Recorder,
    assert_equal_parameters,
    make_data,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


# -- the policy phase


@pytest.mark.parametrize(
    "options", [{}, {"normalization": {"rewards": True}, "clipping": {"value": 0.2}}, {"target_kl": 1e-4}]
)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.usefixtures("through_autograd")
def test_the_policy_phase_is_ppo_bit_for_bit(options: dict[str, Any], shared: bool) -> None:
    # Parameters one by one: the default takes them together, which rounds otherwise, where all of them have gradients.
    options = merged(options, {"optimizer": {"name": "torch.optim.Adam", "options": {"eps": 1e-5, "fused": True}}})
    model = make(num_policy_iterations=9, architecture="shared" if shared else "dual", num_epochs=2, **options)
    torch.manual_seed(0)
    kept = {name: model.hparams[name] for name in ("gamma", "value_coef", "entropy_coef", "advantages")}
    own = {"policy": {"shared_encoder": shared}, "optimizer": {"max_grad_norm": None}, "num_epochs": 2}
    ppo = PPO(VECTOR, DISCRETE, **merged(SMALL, kept, own, options))
    before = parameters_of(model)
    for one in (model, ppo):
        fit(one, 3)
    for name, parameter in ppo.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name
    assert change(model, before, HEAD) == 0


def test_the_policy_phase_does_not_change_the_auxiliary_head() -> None:
    seen: list[torch.Tensor] = []

    class Heads(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(pl_module.policy.auxiliary_head.weight.detach().clone())

    fit(make(separate_aux_optimizer=False), 6, Heads())
    moved = [not torch.equal(one, other) for one, other in itertools.pairwise(seen)]
    assert moved == [True, False, True, False, True]


# -- the auxiliary phase


def test_the_logged_divergence_is_the_mean_over_all_steps_of_the_phase() -> None:
    class Observed(PPG):
        @torch.no_grad()
        def observe_divergence(self) -> None:
            super().observe_divergence()
            minibatches = [minibatch for _, minibatch in self._stored_minibatches(torch.arange)]
            self.expected = torch.cat([self.divergence(x, self.actor_critic(x)[0]) for x in minibatches]).mean()

    model = make(Observed)
    recorder = fit(model, 2)
    assert recorder.rows[1]["aux_kl"] == pytest.approx(model.expected.item(), rel=1e-4)


def test_an_auxiliary_phase_after_value_only_passes_trains_the_whole_network() -> None:
    recorder = fit(make(optimizer={"num_value_epochs": 2}), 2)
    assert recorder.rows[1]["aux_cloning_loss"] > 0


def test_an_auxiliary_phase_follows_each_policy_phase() -> None:
    recorder = fit(make(num_policy_iterations=3), 7)
    assert ["aux_head_loss" in row for row in recorder.rows] == [False, False, True] * 2 + [False]
    of_phase = ("aux_learning_rate", "aux_cloning_loss", "aux_value_loss", "aux_grad_norm", "aux_kl")
    assert all(name in recorder.rows[2] for name in of_phase)
    assert 0 < recorder.rows[2]["aux_kl"] < 1
    bytes_ = 4 * ROWS * (3 + 2)
    assert recorder.column("aux_memory_bytes") == [bytes_, 2 * bytes_, 3 * bytes_] * 2 + [bytes_]


def loss_of(model: PPG, **coefs: float) -> dict[str, torch.Tensor | None]:
    """Gradients of the auxiliary loss with weights of its parts."""
    for name, value in coefs.items():
        setattr(model, name, value)
    model.trainer = make_trainer()
    batch = random_rollout(model.policy).flatten(returns=torch.ones(12, 4))
    batch = batch.replace(old_distribution=torch.randn(48, 3))
    model.auxiliary_loss(batch).total.backward()
    return {name: p.grad for name, p in model.policy.named_parameters()}


@pytest.mark.parametrize("architecture", ["dual", "shared", "detached"])
def test_the_auxiliary_loss_trains_the_features_of_the_policy(architecture: Any) -> None:
    model = make(architecture=architecture, cloning_coef=0.0, aux_value_coef=0.0)
    gradients = loss_of(model)
    shaped = {name for name, gradient in gradients.items() if gradient is not None and gradient.abs().max() > 0}
    assert shaped == {n for n in gradients if n.startswith(("actor_encoder", "auxiliary_head"))}


@pytest.mark.parametrize(("architecture", "encoder"), [("dual", "critic_"), ("shared", "actor_"), ("detached", None)])
def test_architecture_decides_which_parameters_the_value_loss_trains(architecture: Any, encoder: str | None) -> None:
    model = make(architecture=architecture)
    model.policy.value(torch.randn(5, 3)).sum().backward()
    shaped = {name.split(".")[0] for name, p in model.policy.named_parameters() if p.grad is not None}
    assert shaped == {"value_head", *([f"{encoder}encoder"] if encoder else [])}
    assert (model.policy.critic_encoder is not None) == (architecture == "dual")


def test_value_passes_do_not_decay_the_weights_of_a_detached_policy() -> None:
    models = [
        make(architecture="detached", num_minibatches=1, optimizer={"l2": {"policy": 0.1, "shared": 0.1}, **passes})
        for passes in ({}, {"num_value_epochs": 3})
    ]
    for model in models:
        fit(model, 1)  # no auxiliary phase
    one, three = map(parameters_of, models)
    assert {name.split(".")[1] for name in one if not torch.equal(one[name], three[name])} == {"value_head"}


def test_the_cloning_loss_keeps_the_policy_in_the_auxiliary_phase() -> None:
    moved = {}
    for coef in (0.0, 1.0, 100.0):
        model = make(cloning_coef=coef, num_aux_epochs=20)
        torch.nn.init.ones_(model.policy.action_head.logits.weight[:1].detach())  # away from the uniform policy
        moved[coef] = fit(model, 2).rows[1]["aux_kl"]
    assert moved[0.0] > 3 * moved[1.0] > 9 * moved[100.0] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"num_policy_iterations": 1},
        {"num_aux_epochs": 1},
        {"num_aux_minibatches": 2},
        {"num_aux_minibatches": None, "num_minibatches": 4},
        {"aux_sequences": True},
        {"cloning_coef": 0.0},
        {"aux_value_coef": 0.0},
        {"aux_clip_range_value": 0.01},
        {"aux_learning_rate_scale": 0.1},
        {"kl_penalty_coef": 10.0},
        {"separate_aux_optimizer": False},
        {"architecture": "shared"},
        {"architecture": "detached"},
    ],
    ids=str,
)
def test_every_option_changes_the_result(options: dict[str, Any]) -> None:
    """Of the shapes that both have, some parameter is another one."""
    fit(model := make(**options), 4)
    pairs = zip(model.parameters(), learned().parameters(), strict=False)
    assert max(float((one - other).detach().abs().max()) for one, other in pairs if one.shape == other.shape) > 1e-4


def test_aux_learning_rate_scale_scales_the_learning_rate() -> None:
    model = make(aux_learning_rate_scale=0.25, optimizer={"scheduler": STEP}, separate_aux_optimizer=False)
    recorder = fit(model, 4)
    assert recorder.column("learning_rate") == pytest.approx([3e-4, 3e-5, 3e-6, 3e-7])  # after each rollout
    assert recorder.rows[1]["aux_learning_rate"] == pytest.approx(0.25 * 3e-4)
    assert recorder.rows[3]["aux_learning_rate"] == pytest.approx(0.25 * 3e-6)


STEP = {"name": "torch.optim.lr_scheduler.StepLR", "options": {"step_size": 1}}


def test_the_learning_rate_of_each_phase_is_logged() -> None:
    logger = MemoryLogger()
    fit(make(aux_learning_rate_scale=0.5), 2, logger=logger, log_every_n_steps=1)
    rates = {name: x for row, _ in logger.calls for name, x in row.items() if "learning_rate" in name}
    assert rates == {"train/learning_rate": 3e-3, "train/aux_learning_rate": pytest.approx(1.5e-3)}


def test_the_learning_rate_adapts_after_a_rollout_with_an_auxiliary_phase_too() -> None:
    adaptive = {"target_kl": 1e9, "factor": 1.25, "maximum": 1.0}  # every rollout is below the target
    model = make(num_policy_iterations=1, optimizer={"adaptive_learning_rate": adaptive})
    fit(model, 3)
    assert model.optimizers()[0].param_groups[0]["lr"] == pytest.approx(3e-3 * 1.25**3)


def test_the_learning_rate_stays_after_a_rollout_that_only_the_auxiliary_phase_learns_from() -> None:
    class LeavesOut(PPG):
        def step_weights(self, rollout: Rollout) -> torch.Tensor:
            return torch.full_like(rollout.rewards, float(self.policy_version == 0))

    adaptive = {"target_kl": 1e9, "factor": 1.25, "maximum": 1.0}
    model = make(LeavesOut, optimizer={"adaptive_learning_rate": adaptive})
    recorder = fit(model, 2)
    assert "policy_loss" not in recorder.rows[1] and recorder.rows[1]["aux_head_loss"] > 0
    assert model.optimizers()[0].param_groups[0]["lr"] == pytest.approx(3e-3 * 1.25)


def test_target_kl_does_not_stop_the_auxiliary_phase() -> None:
    model = make(target_kl=1e-9)
    before = parameters_of(model)
    recorder = fit(model, 2)
    assert recorder.rows[1]["aux_head_loss"] > 0
    assert change(model, before, HEAD) > 1e-3


@pytest.mark.parametrize("sequences", [False, True])
def test_an_auxiliary_pass_uses_every_real_step_once(sequences: bool) -> None:
    parts: list[Batch] = []

    class Kept(PPG):
        def auxiliary_loss(self, batch: Batch) -> Loss:
            parts.append(batch)
            return super().auxiliary_loss(batch)

    model = make(Kept, aux_sequences=sequences, num_aux_epochs=1, num_aux_minibatches=3)
    rollouts = [random_rollout(model.policy, seed=seed, off_policy=0.0, valid=True) for seed in (0, 1)]
    make_trainer().fit(model, FixedRollouts(rollouts, model))
    steps = torch.cat([rollout.flatten().observations for rollout in rollouts])
    found = torch.cat([part.observations for part in parts])
    assert len(found) == len(steps) < 2 * ROWS
    assert torch.equal(found.unique(dim=0), steps.unique(dim=0))
    assert [part.weight for part in parts] == [1 / len(part) for part in parts]
    if sequences:  # eight of them, in three parts, each whole
        lengths = [[int(r.valid[:, b].sum()) for b in range(4)] for r in rollouts if r.valid is not None]
        sequence_of = {
            tuple(x.tolist()): (i, b) for i, r in enumerate(rollouts) for b in range(4) for x in r.observations[:, b]
        }
        for part in parts:
            owners = [sequence_of[tuple(x.tolist())] for x in part.observations]
            assert len(part) == sum(lengths[i][b] for i, b in set(owners))


@pytest.mark.parametrize("options", [{"aux_sequences": True, "num_aux_minibatches": 16}, {"num_aux_minibatches": 200}])
def test_auxiliary_minibatches_without_rows_are_skipped(options: dict[str, Any]) -> None:
    """A minibatch without rows would move Adam along its moments, and enter the logged means."""
    sizes: list[int] = []

    class Kept(PPG):
        def auxiliary_loss(self, batch: Batch) -> Loss:
            sizes.append(len(batch))
            return super().auxiliary_loss(batch)

    model = make(Kept, num_aux_epochs=1, **options)
    rollouts = [random_rollout(model.policy, seed=seed, off_policy=0.0) for seed in (0, 1)]
    make_trainer().fit(model, FixedRollouts(rollouts, model))
    assert sizes == ([ROWS // 4] * 8 if "aux_sequences" in options else [1] * 2 * ROWS)


def test_sequences_of_weight_0_have_no_effect():
    """Their distributions are kept as well: a Beta of zeros, which is none, would have a divergence of NaN."""
    data = make_data("Pendulum-v1", rollouts_per_epoch=2)

    class LastAlone(PPG):
        def step_weights(self, rollout: Rollout) -> torch.Tensor:
            return (torch.arange(16) >= 8).float().unsqueeze(1).expand(rollout.shape)

    memory = {"kind": "gru", "hidden_size": 4, "sequence_length": 8}
    options = {"num_policy_iterations": 2, "num_aux_epochs": 2, "num_aux_minibatches": 4, "num_minibatches": 1}
    policy = {"hidden_sizes": (8,), "memory": memory, "action_distribution": "beta"}
    model = LastAlone(data.observation_space, data.action_space, policy=policy, **options)
    sizes: list[int] = []
    evaluated = model.auxiliary_loss
    model.auxiliary_loss = lambda batch: sizes.append(int((batch.weights != 0).sum())) or evaluated(batch)
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(model, data)
    assert sum(sizes) == 2 * 2 * 16 and min(sizes) > 0
    assert abs(recorder.rows[-1]["aux_kl"]) < 1e-3


@pytest.mark.parametrize("options", [{}, {"aux_sequences": True}])
def test_steps_of_weight_0_are_in_no_auxiliary_minibatch(options):
    class LastHalf(PPG):
        def step_weights(self, rollout: Rollout) -> torch.Tensor:
            rollout.observations[:8] = torch.nan
            return (torch.arange(16) >= 8).float().unsqueeze(1).expand(rollout.shape)

    data = make_data(rollouts_per_epoch=1)
    options = {"num_policy_iterations": 1, "num_aux_epochs": 1, "num_minibatches": 1} | options
    model = LastHalf(data.observation_space, data.action_space, policy={"hidden_sizes": (8,)}, **options)
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(model, data)
    assert math.isfinite(recorder.rows[-1]["aux_kl"]) and recorder.rows[-1]["aux_cloning_loss"] >= 0


# -- the memory


def test_images_are_stored_once_as_bytes_on_the_cpu() -> None:
    data = make_data(PIXELS, num_envs=2, rollout_length=8, rollouts_per_epoch=2)
    model = PPG(
        data.observation_space,
        data.action_space,
        num_policy_iterations=3,
        policy={"hidden_sizes": ()},
        num_minibatches=2,
    )
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(model, data)
    kept = model.kept.gather(model.kept.steps())
    assert kept["observations"].dtype == torch.uint8
    assert recorder.column("aux_memory_bytes") == [16 * (7 * 7 * 3 + 8), 32 * (7 * 7 * 3 + 8)]


def test_too_small_aux_memory_raises_before_collection() -> None:
    data = make_data(num_envs=4, rollout_length=32)
    needed = 2 * 4 * 32 * (4 * 4 + 8) / 2**30
    for gib, fits in ((1.01 * needed, True), (0.99 * needed, False)):
        model = PPG(data.observation_space, data.action_space, **PHASE | {"aux_memory_gib": gib})
        if fits:
            make_trainer(max_epochs=0).fit(model, data)
        else:
            with pytest.raises(ConfigurationError, match=r"aux_memory_gib=.* at least .*, for 256 steps of 24 bytes"):
                make_trainer(max_epochs=0).fit(model, data)


def test_rollouts_of_another_shape_restart_the_phase() -> None:
    model = make(num_policy_iterations=3)
    rollouts = [random_rollout(model.policy, length=length, off_policy=0.0) for length in (12, 12, 10, 10)]
    make_trainer().fit(model, FixedRollouts(rollouts, model))
    assert (len(model.kept), model.kept.shape) == (2, (10, 4))


# -- what is not finite


class Broken(PPG):
    """Some rollouts have a reward that is NaN, some auxiliary phases a target."""

    broken: tuple[int, ...] = ()

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        if self.policy_version in self.broken:
            rollout.rewards[2, 1] = torch.nan
        super().training_step(rollout, batch_idx)


@pytest.mark.parametrize("check_numerics", [False, True])
def test_rollouts_with_skipped_updates_are_not_stored(check_numerics: bool) -> None:
    model = make(Broken, num_policy_iterations=3, debug={"max_skipped_updates": 1, "check_numerics": check_numerics})
    model.broken = (1, 3)
    with pytest.warns(UserWarning, match="were skipped"):
        recorder = fit(model, 6)
    assert ["aux_head_loss" in row and "aux_kl" in row for row in recorder.rows] == [False] * 4 + [True, False]
    assert len(model.kept) == 1
    assert model.kept.gather(model.kept.steps())["returns"].isfinite().all()


class BrokenPhase(PPG):
    """The second minibatch of the first auxiliary phase has an infinite target."""

    num_minibatches_seen = 0

    def auxiliary_loss(self, batch: Batch) -> Loss:
        self.num_minibatches_seen += 1
        if self.num_minibatches_seen == 2:
            batch.returns += torch.inf
        return super().auxiliary_loss(batch)


def test_a_failed_auxiliary_phase_is_skipped_and_repeated(tmp_path: Path) -> None:
    model = make(BrokenPhase)
    with pytest.raises(FloatingPointError) as caught:
        fit(model, 2, default_root_dir=tmp_path)
    assert str(caught.value).startswith("aux_head_loss is inf in the update from rollout 1")
    found = re.search(r"load\('(.*)'\)", str(caught.value))
    assert found is not None
    failed = FailedUpdate.load(found[1])
    assert failed.loss == "auxiliary_loss" and failed.terms["aux_head_loss"] == torch.inf
    assert_equal_parameters(failed.module, parameters_of(model))
    assert failed.replay()["head_loss"] == torch.inf
    assert failed.minibatch.returns.isinf().all()


def test_weights_of_stored_steps_are_summed_over_ranks_on_their_devices(monkeypatch) -> None:
    fit(model := make(num_policy_iterations=9), 1)
    devices = []  # NCCL has no sums of tensors on the CPU, where the steps are stored
    monkeypatch.setattr(batch, "world_size", lambda: 2)
    monkeypatch.setattr(batch, "all_reduce", lambda x: devices.append(x.device.type) or torch.ones(len(x)))
    model.to("meta")
    next(model._stored_minibatches(torch.arange))
    assert devices == ["meta"]
