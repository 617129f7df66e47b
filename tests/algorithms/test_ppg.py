"""Both PPGs, phase by phase: what each changes and leaves alone, keeps, logs and refuses."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch import Callback

from lightning_rl import PPG, PPO, Batch, FailedUpdate, OffPolicyPPG, Rollout
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    CONTINUOUS,
    DISCRETE,
    PIXELS,
    VECTOR,
    FixedRollouts,
    Recorder,
    assert_equal_parameters,
    make_data,
    make_trainer,
    parameters_of,
    random_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
SMALL: dict[str, Any] = {"hidden_sizes": (8,), "num_minibatches": 2, "learning_rate": 3e-3}
PHASE: dict[str, Any] = SMALL | {"num_policy_iterations": 2, "num_aux_epochs": 3, "num_aux_minibatches": 4}
REUSED: dict[str, Any] = SMALL | {
    "num_policy_iterations": 3,
    "updates_per_rollout": 2,
    "batch_size": 32,
    "policy_buffer_size": 64,
    "policy_max_use": 2,
    "value_buffer_size": 128,
    "num_aux_epochs": 2,
    "num_aux_minibatches": 3,
}
ROWS = 48  # of each rollout
HEAD = "policy.auxiliary_head"


def make(algorithm: type[PPG] = PPG, space: spaces.Space[Any] = DISCRETE, **options: Any) -> Any:
    torch.manual_seed(0)
    defaults = REUSED if issubclass(algorithm, OffPolicyPPG) else PHASE
    return algorithm(VECTOR, space, **defaults | options)


def fit(model: PPO, num_rollouts: int, *callbacks: Callback, **options: Any) -> Recorder:
    """Learn from rollouts made up beforehand."""
    rollouts = [random_rollout(model.policy, seed=seed, off_policy=0.0) for seed in range(num_rollouts)]
    recorder = Recorder()
    make_trainer(callbacks=[recorder, *callbacks], **options).fit(model, FixedRollouts(rollouts, model))
    return recorder


def change(model: PPG, before: dict[str, torch.Tensor], part: str = "") -> float:
    changes = [(p.detach() - before[n]).abs().max() for n, p in model.named_parameters() if n.startswith(part)]
    return float(torch.stack(changes).max())


# -- the policy phase


@pytest.mark.parametrize("options", [{}, {"normalize_rewards": True, "clip_range_value": 0.2}, {"target_kl": 1e-4}])
@pytest.mark.parametrize("shared", [False, True])
def test_the_policy_phase_is_ppo_bit_for_bit(options: dict[str, Any], shared: bool) -> None:
    model = make(num_policy_iterations=9, architecture="shared" if shared else "dual", num_epochs=2, **options)
    torch.manual_seed(0)
    kept = {n: model.hparams[n] for n in ("gamma", "value_coef", "entropy_coef", "normalize_advantages")}
    ppo = PPO(VECTOR, DISCRETE, shared_encoder=shared, num_epochs=2, max_grad_norm=None, **SMALL | kept | options)
    before = parameters_of(model)
    for one in (model, ppo):
        fit(one, 3)
    for name, parameter in ppo.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name
    assert change(model, before, HEAD) == 0


def test_the_auxiliary_head_keeps_still_in_the_policy_phase_whatever_its_momentum() -> None:
    seen: list[torch.Tensor] = []

    class Heads(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(pl_module.policy.auxiliary_head.weight.detach().clone())

    fit(make(separate_aux_optimizer=False), 6, Heads())
    moved = [not torch.equal(one, other) for one, other in itertools.pairwise(seen)]
    assert moved == [True, False, True, False, True]


# -- the auxiliary phase


def test_an_auxiliary_phase_follows_every_last_iteration_of_a_policy_phase() -> None:
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
    model.auxiliary_loss(batch).backward()
    return {name: p.grad for name, p in model.policy.named_parameters()}


@pytest.mark.parametrize("architecture", ["dual", "shared", "detached"])
def test_the_auxiliary_head_shapes_the_features_of_the_policy(architecture: Any) -> None:
    model = make(architecture=architecture, cloning_coef=0.0, aux_value_coef=0.0)
    gradients = loss_of(model)
    shaped = {name for name, gradient in gradients.items() if gradient is not None and gradient.abs().max() > 0}
    assert shaped == {n for n in gradients if n.startswith(("actor_encoder", "auxiliary_head"))}


@pytest.mark.parametrize(("architecture", "encoder"), [("dual", "critic_"), ("shared", "actor_"), ("detached", None)])
def test_what_the_value_shapes_is_a_matter_of_architecture(architecture: Any, encoder: str | None) -> None:
    model = make(architecture=architecture)
    model.policy.value(torch.randn(5, 3)).sum().backward()
    shaped = {name.split(".")[0] for name, p in model.policy.named_parameters() if p.grad is not None}
    assert shaped == {"value_head", *([f"{encoder}encoder"] if encoder else [])}
    assert (model.policy.critic_encoder is not None) == (architecture == "dual")


def test_the_auxiliary_phase_moves_what_it_says_and_cloning_holds_the_policy() -> None:
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
def test_every_option_makes_a_difference(options: dict[str, Any]) -> None:
    """Of the shapes that both have, some parameter is another one."""
    model, plain = make(**options), make()
    for one in (model, plain):
        fit(one, 4)
    pairs = zip(model.parameters(), plain.parameters(), strict=False)
    assert max(float((one - other).detach().abs().max()) for one, other in pairs if one.shape == other.shape) > 1e-4


def test_the_learning_rate_of_the_phase_is_a_share_of_that_of_the_policy() -> None:
    recorder = fit(make(aux_learning_rate_scale=0.25, lr_scheduler=STEP, separate_aux_optimizer=False), 4)
    assert recorder.column("learning_rate") == pytest.approx([3e-4, 3e-5, 3e-6, 3e-7])  # after each rollout
    assert recorder.rows[1]["aux_learning_rate"] == pytest.approx(0.25 * 3e-4)
    assert recorder.rows[3]["aux_learning_rate"] == pytest.approx(0.25 * 3e-6)


STEP = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1}}


def test_an_early_stop_of_the_policy_phase_is_none_of_the_auxiliary_phase() -> None:
    model = make(target_kl=1e-9)
    before = parameters_of(model)
    recorder = fit(model, 2)
    assert recorder.rows[1]["aux_head_loss"] > 0
    assert change(model, before, HEAD) > 1e-3


@pytest.mark.parametrize("sequences", [False, True])
def test_a_pass_of_the_auxiliary_phase_goes_over_every_real_step_once(sequences: bool) -> None:
    parts: list[Batch] = []

    class Kept(PPG):
        def begin_minibatch(self, batch: Batch) -> Batch:
            if "actions" not in batch.fields:
                parts.append(batch)
            return super().begin_minibatch(batch)

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


# -- the memory


def test_images_are_kept_as_bytes_on_the_cpu_and_once() -> None:
    data = make_data(PIXELS, num_envs=2, rollout_length=8, rollouts_per_epoch=2)
    model = PPG(data.observation_space, data.action_space, num_policy_iterations=3, hidden_sizes=(), num_minibatches=2)
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(model, data)
    kept = model.kept.gather(model.kept.steps())
    assert kept["observations"].dtype == torch.uint8
    assert recorder.column("aux_memory_bytes") == [16 * (7 * 7 * 3 + 8), 32 * (7 * 7 * 3 + 8)]


def test_a_memory_that_would_not_fit_is_refused_before_anything_is_collected() -> None:
    data = make_data(num_envs=4, rollout_length=32)
    needed = 2 * 4 * 32 * (4 * 4 + 8) / 2**30
    for gib, fits in ((1.01 * needed, True), (0.99 * needed, False)):
        model = PPG(data.observation_space, data.action_space, **PHASE | {"aux_memory_gib": gib})
        if fits:
            make_trainer(max_epochs=0).fit(model, data)
        else:
            with pytest.raises(ConfigurationError, match=r"aux_memory_gib=.* at least .*, for 256 steps of 24 bytes"):
                make_trainer(max_epochs=0).fit(model, data)


def test_rollouts_of_another_shape_begin_the_phase_anew() -> None:
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
def test_a_rollout_that_is_left_out_is_not_kept_either(check_numerics: bool) -> None:
    model = make(Broken, num_policy_iterations=3, max_skipped_updates=1, check_numerics=check_numerics)
    model.broken = (1, 3)
    with pytest.warns(UserWarning, match="were left out"):
        recorder = fit(model, 6)
    assert ["aux_head_loss" in row and "aux_kl" in row for row in recorder.rows] == [False] * 4 + [True, False]
    assert len(model.kept) == 1
    assert model.kept.gather(model.kept.steps())["returns"].isfinite().all()


class BrokenPhase(PPG):
    """The second minibatch of the first auxiliary phase has an infinite target."""

    def begin_minibatch(self, batch: Batch) -> Batch:
        self.minibatch = getattr(self, "minibatch", -1) + 1
        if self.diagnostics.phase == 1 and self.minibatch == 5:
            batch = batch.replace(returns=batch.returns + torch.inf)
        return super().begin_minibatch(batch)


def test_a_failed_auxiliary_phase_is_left_out_and_made_again(tmp_path: Path) -> None:
    model = make(BrokenPhase)
    with pytest.raises(FloatingPointError) as caught:
        fit(model, 2, default_root_dir=tmp_path)
    assert str(caught.value).startswith("aux_head_loss is inf in the update from rollout 1")
    found = re.search(r"load\('(.*)'\)", str(caught.value))
    assert found is not None
    failed = FailedUpdate.load(found[1])
    assert (failed.phase, failed.number) == (1, 1)
    assert_equal_parameters(failed.module, parameters_of(model))
    failed.module.minibatch = 1  # of the policy phase, two have gone by in the first rollout
    assert failed.replay()["aux_head_loss"] == torch.inf
    assert failed.minibatch is not None
    assert failed.minibatch.returns.isinf().all()


# -- off-policy


def test_off_policy_iterations_go_on_over_rollouts_and_end_where_rows_run_out() -> None:
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

    def policy_iteration(self, samples: dict[str, Batch]) -> None:
        self.drawn.append({name: batch.observations for name, batch in samples.items()})
        super().policy_iteration(samples)


def test_every_row_is_used_as_often_as_it_may_be() -> None:
    model = make(Counting, policy_max_use=2, value_max_use=3, updates_per_rollout=9, value_buffer_size=64)
    fit(model, 1)
    for name, limit in (("policy", 2), ("value", 3)):
        rows = torch.cat([drawn[name] for drawn in model.drawn])
        assert rows.unique(dim=0, return_counts=True)[1].max() <= limit
        for drawn in model.drawn:
            assert len(drawn[name].unique(dim=0)) == 32
    assert len(model.sources["policy"]) < 32 or len(model.sources["value"]) < 32


def test_ratios_of_rows_that_are_used_again_are_those_of_the_policy_that_took_them() -> None:
    """Its log-probability is stored, and the loss is that of PPO over other rows."""
    model = make(OffPolicyPPG, policy_max_use=None, policy_buffer_size=ROWS, learning_rate=0.05)
    recorder = fit(model, 3)
    assert max(recorder.column("first_ratio_error")) > 0  # made up by the first parameters
    rows = model.sources["policy"].take(torch.arange(4))
    expected = random_rollout(make(OffPolicyPPG).policy, seed=2, off_policy=0.0)
    assert any(torch.equal(rows["log_probs"][0], x) for x in expected.log_probs.flatten())


def test_off_policy_rollouts_are_on_policy_when_they_come() -> None:
    data = make_data(num_envs=4, rollout_length=16, rollouts_per_epoch=4)
    model = OffPolicyPPG(data.observation_space, data.action_space, **REUSED | {"updates_per_rollout": 4})
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(model, data)
    assert max(recorder.column("first_ratio_error")) <= 1e-6
    assert recorder.rows[3]["value_age"] > 0


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
        {"num_value_epochs": 2},
        {"kl_rollback": True, "target_kl": 1e-6},
        {"normalize_advantages": "rollout"},
        {"num_policy_iterations": 1},
    ],
    ids=str,
)
def test_every_option_of_off_policy_ppg_makes_a_difference(options: dict[str, Any]) -> None:
    model, plain = make(OffPolicyPPG, **options), make(OffPolicyPPG)
    for one in (model, plain):
        fit(one, 4)
    assert change(model, parameters_of(plain)) > 1e-4


def test_a_rollout_that_is_left_out_is_in_no_buffer() -> None:
    class BrokenRollouts(OffPolicyPPG):
        def training_step(self, rollout: Rollout, batch_idx: int) -> None:
            if self.policy_version == 1:
                rollout.rewards[:] = torch.nan
            super().training_step(rollout, batch_idx)

    model = make(BrokenRollouts, max_skipped_updates=1)
    with pytest.warns(UserWarning, match="were left out"):
        fit(model, 2)
    for buffer in model.sources.values():
        state = buffer.state_dict()
        assert state["fields"]["returns"].isfinite().all()
        assert (state["uses"] >= 0).sum() <= ROWS


# -- every kind of policy, and nonsense


@pytest.mark.parametrize("algorithm", [PPG, OffPolicyPPG])
@pytest.mark.parametrize("architecture", ["dual", "shared", "detached"])
@pytest.mark.parametrize("space", [DISCRETE, CONTINUOUS, spaces.Dict({"a": CONTINUOUS, "b": spaces.MultiBinary(2)})])
def test_every_action_space_learns_in_every_architecture(algorithm: Any, architecture: Any, space: Any) -> None:
    model = make(algorithm, space, architecture=architecture, action_distribution=None)
    before = parameters_of(model)
    rollouts = [nested_rollout(model, seed) for seed in range(4)]
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(model, FixedRollouts(rollouts, model))
    assert any(row.get("aux_kl", 0) > 0 for row in recorder.rows)
    for name in before:
        assert change(model, before, name) > 0, name


def nested_rollout(model: PPG, seed: int) -> Rollout:
    rollout = random_rollout(PPO(VECTOR, DISCRETE, hidden_sizes=(8,)).policy, seed=seed)
    observations = rollout.observations[:-1]
    with torch.no_grad():
        distribution, _ = model.policy(observations)
        rollout.actions = distribution.sample(torch.Generator().manual_seed(seed))
        rollout.log_probs = distribution.log_prob(rollout.actions)
    return rollout


BOUNDS = {"32-true": 1e-6, "64-true": 1e-12, "bf16-mixed": 1e-2, "bf16-true": 1e-2}


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("algorithm", [PPG, OffPolicyPPG])
def test_both_phases_learn_in_every_precision(algorithm: type[PPG], precision: str) -> None:
    data = make_data(num_envs=4, rollout_length=16, rollouts_per_epoch=4)
    options = REUSED if algorithm is OffPolicyPPG else PHASE
    model = algorithm(data.observation_space, data.action_space, **options)
    recorder = Recorder()
    make_trainer(precision=precision, callbacks=[recorder]).fit(model, data)
    assert max(recorder.column("first_ratio_error")) <= BOUNDS[precision]
    assert sum(row.get("aux_kl", 0) > 0 for row in recorder.rows) >= 2


@pytest.mark.parametrize(
    "memory", ["lstm", {"kind": "gru", "hidden_size": 8, "sequence_length": 4, "burn_in": 3}], ids=str
)
@pytest.mark.parametrize("architecture", ["dual", "shared", "detached"])
def test_a_policy_with_memory_begins_the_auxiliary_phase_where_it_is(memory: Any, architecture: Any) -> None:
    """From the same states, over the same sequences: with nothing to learn the divergence is 0."""
    data = make_data(num_envs=4, rollout_length=16, rollouts_per_epoch=2, seed=3)
    shared = {"separate": False} if architecture == "detached" else {}
    memory = {"kind": memory} | shared if isinstance(memory, str) else memory | shared
    for options in ({"cloning_coef": 0.0, "aux_value_coef": 0.0, "aux_learning_rate_scale": 1e-30}, {}):
        torch.manual_seed(0)
        arguments: dict[str, Any] = PHASE | {"memory": memory, "architecture": architecture, "num_minibatches": 1}
        model = PPG(data.observation_space, data.action_space, **arguments | options)
        before = parameters_of(model)
        recorder = Recorder()
        make_trainer(precision="64-true", callbacks=[recorder]).fit(model, data)
        assert max(recorder.column("first_ratio_error")) <= 1e-12
        if options:
            assert abs(recorder.rows[1]["aux_cloning_loss"]) < 1e-14
            assert abs(recorder.rows[1]["aux_kl"]) < 1e-14
        else:
            assert recorder.rows[1]["aux_kl"] > 1e-9
            assert all(change(model, before, name) > 0 for name in before)


@pytest.mark.parametrize("value_normalization", ["running_std", "popart"])
def test_both_value_heads_predict_in_the_same_units(value_normalization: Any) -> None:
    """PopArt keeps the predictions of both as they are when its moments change."""
    model = make(value_normalization=value_normalization, num_policy_iterations=9)
    fit(model, 1)
    before = [x.detach() for x in model.policy.forward_auxiliary(torch.ones(1, 3))[1:]]
    normalizer = model.policy.value_normalizer
    deviation = 1 / normalizer.moments.scale(normalizer.epsilon)
    normalizer.update(torch.tensor([100.0, -300.0]), model.policy.value_heads, lambda x: x)
    grown = 1 / normalizer.moments.scale(normalizer.epsilon) / deviation
    assert grown > 5
    for one, other in zip(before, model.policy.forward_auxiliary(torch.ones(1, 3))[1:], strict=True):
        expected = one if value_normalization == "popart" else one * grown.float()
        torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-4)
    model = make(value_normalization=value_normalization)
    plain = make()
    for each in (model, plain):
        fit(each, 4)
    assert change(model, parameters_of(plain) | {n: p for n, p in model.named_parameters() if "normal" in n}) > 1e-4


@pytest.mark.parametrize("separate_aux_optimizer", [False, True])
@pytest.mark.parametrize("algorithm", [PPG, OffPolicyPPG])
def test_actor_and_critic_may_have_an_optimiser_each_in_both_phases(
    algorithm: type[PPG], separate_aux_optimizer: bool
) -> None:
    options = {"critic_learning_rate": 1e-2, "separate_aux_optimizer": separate_aux_optimizer, "num_value_epochs": 2}
    model = make(algorithm, aux_learning_rate_scale=0.5, **options)
    recorder = fit(model, 4)
    assert len(model.all_optimizers) == (4 if separate_aux_optimizer else 2)
    row = next(row for row in recorder.rows if "aux_kl" in row)
    assert min(row[f"{phase}{part}grad_norm"] for phase in ("", "aux_") for part in ("", "critic_")) > 0
    assert row["aux_learning_rate"] == pytest.approx(0.5 * 3e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_policy_iterations": 0}, r"num_policy_iterations=0 .* an integer of at least 1"),
        ({"num_aux_epochs": 0}, r"num_aux_epochs=0 .* an integer of at least 1"),
        ({"num_aux_minibatches": 0.5}, r"num_aux_minibatches=0\.5 .* an integer of at least 1"),
        ({"aux_sequences": 1}, r"aux_sequences=1 .* true or false"),
        ({"cloning_coef": -1}, r"cloning_coef=-1 .* at least 0"),
        ({"aux_value_coef": -1}, r"aux_value_coef=-1 .* at least 0"),
        ({"aux_clip_range_value": 0}, r"aux_clip_range_value=0 .* above 0"),
        ({"kl_penalty_coef": -1}, r"kl_penalty_coef=-1 .* at least 0"),
        ({"aux_learning_rate_scale": 0}, r"aux_learning_rate_scale=0 .* above 0"),
        ({"separate_aux_optimizer": None}, r"separate_aux_optimizer=None .* true or false"),
        ({"aux_memory_gib": 0}, r"aux_memory_gib=0 .* above 0"),
        ({"architecture": "single"}, r"architecture='single' .* one of dual, shared, detached"),
        ({"shared_encoder": True}, r"shared_encoder=True .* architecture says"),
        ({"clip_range": -1}, r"clip_range=-1"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates_per_rollout": 0}, r"updates_per_rollout=0 .* an integer of at least 1"),
        ({"batch_size": 0}, r"batch_size=0 .* an integer of at least 1"),
        ({"policy_buffer_size": 31}, r"policy_buffer_size=31 .* at least batch_size=32"),
        ({"value_buffer_size": 0}, r"value_buffer_size=0 .* an integer of at least 1"),
        ({"policy_max_use": 0}, r"policy_max_use=0 .* an integer of at least 1"),
        ({"num_minibatches": 64}, r"num_minibatches=64 .* no more than batch_size=32"),
        ({"memory": "lstm"}, r"memory='lstm' .* None: steps are drawn one by one"),
        ({"recompute_advantages": True}, r"recompute_advantages=True .* False: those of a step are made once"),
        ({"aux_sequences": True}, r"aux_sequences=True .* False: auxiliary phases learn from steps"),
    ],
)
def test_off_policy_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(OffPolicyPPG, **options)


def test_what_only_the_critic_sees_needs_two_networks() -> None:
    space = spaces.Dict({"seen": VECTOR, "hidden": spaces.Box(-1, 1, (2,), np.float32)})
    PPG(space, DISCRETE, critic_only=["hidden"])
    with pytest.raises(ConfigurationError, match=r"architecture='shared' .* dual, since critic_only"):
        PPG(space, DISCRETE, critic_only=["hidden"], architecture="shared")
