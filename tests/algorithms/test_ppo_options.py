"""PPO's further options, each against loops over rows, and what they do to a run."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rl import PPO, Batch, FailedUpdate
from lightning_rl.training.loss import Loss
from lightning_rl.training.optimizers import AdaptiveLearningRate
from lightning_rl.training.parameter_groups import parameters_of_other_half
from lightning_rl.validation import ConfigurationError
from tests.algorithms.slow_options import MORE, SlowOptions
from tests.algorithms.slow_ppo import DEFAULTS
from tests.algorithms.test_ppo import GeneratorStates, assert_close, make
from tests.helpers import (
    DISCRETE,
    VECTOR,
    FixedRollouts,
    MemoryLogger,
    Recorder,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)
from tests.recorded import remember

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

# Rates at which ratios and values move by as much as the option bounds.
FAST = {"learning_rate": 2e-2}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "more_value_epochs": {"num_epochs": 2, "optimizer": {"num_value_epochs": 4}},
    "fewer_value_epochs": {"num_epochs": 4, "optimizer": {"num_value_epochs": 2}},
    "low": {"clipping": {"low": 0.05}},
    "high": {"clipping": {"high": 0.05}},
    "low_and_high": {"clipping": {"low": 0.3, "high": 0.1}},
    "dual": {"clipping": {"dual": 1.2}, **FAST},
    "huber": {"clipping": {"value_huber_delta": 0.3}},
    "huber_and_clipped": {"clipping": {"value_huber_delta": 0.3, "value": 0.05}, **FAST},
    "recompute_advantages": {"advantages": {"recompute_advantages": True}, **FAST},
    "rollback": {"clipping": {"rollback": True}, "target_kl": 0.06, **FAST},
}


def learn(options: dict[str, Any], valid: bool = False) -> tuple[dict[str, Tensor], SlowOptions, PPO, int]:
    """Parameters after two rollouts and the slow PPO that learned from the same; the model and its global steps."""
    model = make("discrete", torch.float64, **options)
    rollouts = [random_rollout(make("discrete", torch.float64).policy, seed=seed, valid=valid) for seed in (1, 2)]
    slow = SlowOptions(parameters_of(model.policy), {k: v for k, v in options.items() if k in DEFAULTS | MORE})
    states = GeneratorStates()
    trainer = make_trainer(precision="64-true", callbacks=[states])
    trainer.fit(model, FixedRollouts([copy.copy(rollout) for rollout in rollouts], model))
    for rollout, state in zip(rollouts, states.states, strict=True):
        generator = torch.Generator()
        generator.set_state(state)
        slow.learn(rollout, generator)
    return parameters_of(model.policy), slow, model, trainer.global_step


@functools.cache
def learned(option: str, **more: Any) -> tuple[dict[str, Tensor], SlowOptions, PPO, int]:
    return learn(OPTIONS[option] | more)


@pytest.mark.parametrize("option", OPTIONS)
def test_parameters_after_two_rollouts_equal_the_slow_implementation(option):
    fast, slow, _, updates = learned(option)
    assert_close(fast, {name: p.detach() for name, p in slow.parameters.items()}, 1e-12)
    assert updates == slow.num_updates


@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "nothing"])
def test_every_option_changes_the_result(option):
    same = {k: v for k, v in OPTIONS[option].items() if k in ("learning_rate", "num_epochs", "target_kl")}
    without = learned("nothing", **same)[0]
    assert max((p - without[name]).abs().max() for name, p in learned(option)[0].items()) > 1e-4


def test_recomputed_advantages_skip_reset_steps():
    fast, slow, *_ = learn(OPTIONS["recompute_advantages"], valid=True)
    assert_close(fast, {name: p.detach() for name, p in slow.parameters.items()}, 1e-12)


@pytest.mark.parametrize("separate", [False, True])
def test_value_only_passes_do_not_change_the_actor(separate):
    """Adam's moments must not change either: with a gradient of zero it would still move."""
    critic = {"learning_rate": 1e-3} if separate else {}
    optimizer = {"max_grad_norm": None, "critic": critic}
    options = {"num_epochs": 2, "optimizer": optimizer, "advantages": {"normalize": "none"}}
    fast, _, model, updates = learn(merged(options, {"optimizer": {"num_value_epochs": 4}}))
    joint = learn(options)[0]
    moved = {name for name, p in fast.items() if not torch.equal(p, joint[name])}
    assert {name.split(".")[0] for name in moved} >= {"critic_encoder", "value_head"}
    steps = {
        name: sum(float(x.state[p]["step"]) for x in model.steps.all_optimizers if p in x.state)
        for name, p in model.policy.named_parameters()
    }
    assert {steps[name] for name in steps if name.startswith(("actor", "action"))} == {2 * 2 * 4}
    assert {steps[name] for name in steps if name.startswith(("critic", "value"))} == {2 * 4 * 4}
    # An update is one global step, whichever optimisers step.
    assert updates == 2 * 4 * 4


def test_value_only_passes_of_a_shared_encoder_keep_the_action_head():
    model = PPO(
        VECTOR,
        DISCRETE,
        policy={"hidden_sizes": (8,), "shared_encoder": True},
        optimizer={"num_value_epochs": 3},
        num_epochs=1,
    )
    make_trainer().fit(model, FixedRollouts([random_rollout(model.policy)], model))
    steps = {name: int(model.optimizers().state[p]["step"]) for name, p in model.policy.named_parameters()}
    assert {steps[name] for name in steps if name.startswith("action_head")} == {4}
    assert {steps[name] for name in steps if not name.startswith("action_head")} == {12}


def test_approx_kl_ignores_clipped_log_probs():
    """Before any update there is none; the ratios, of clipped log-probabilities to those that acted, are far from 1."""
    model = make(
        "continuous", torch.float64, clipping={"log_prob": 0.1}, target_kl=0.01, num_epochs=1, num_minibatches=1
    )
    torch.nn.init.constant_(model.policy.action_head.log_std, -2.0)  # for densities above e^0.1 too
    recorder = Recorder()
    rollout = random_rollout(model.policy, off_policy=0)
    assert (rollout.log_probs > 0.5).any()
    assert (rollout.log_probs < -0.5).any()
    trainer = make_trainer(precision="64-true", callbacks=[recorder])
    trainer.fit(model, FixedRollouts([rollout], model))
    (seen,) = recorder.rows
    assert abs(seen["approx_kl"]) + abs(seen["approx_kl_k1"]) < 1e-12
    assert trainer.global_step == model.steps.record.num_updates == 1
    ratios = (rollout.log_probs.clamp(-0.1, 0.1) - rollout.log_probs).exp()
    assert seen["clip_fraction"] == pytest.approx(((ratios - 1).abs() > 0.2).double().mean().item())
    assert seen["clip_fraction"] > 0.5


def test_passes_that_train_the_value_alone_do_not_depend_on_target_kl(through_autograd):
    options = {"target_kl": 10.0, "num_epochs": 1, "num_minibatches": 1, "optimizer": {"num_value_epochs": 3}}
    model, trainer = make("discrete", torch.float64, **options), make_trainer(precision="64-true")
    trainer.fit(model, FixedRollouts([random_rollout(model.policy)], model))
    assert trainer.global_step == 3


@pytest.mark.parametrize("half", ["actor", "critic"])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_loss_of_one_half_depends_on_all_of_its_parameters(half, separate, shared):
    """DDP waits for each gradient: what has none must be known."""
    memory = {"kind": "gru", "hidden_size": 4, "separate": separate or not shared}
    model = PPO(VECTOR, DISCRETE, policy={"hidden_sizes": (4,), "shared_encoder": shared, "memory": memory})
    rollout = random_rollout(make("discrete", torch.float32).policy)
    remember(model.policy, rollout)
    (batch,) = model.one_pass(model.batch(rollout), 1)
    model.steps.part = half
    model.loss(batch).total.backward()
    others = {id(parameter) for parameter in parameters_of_other_half(model.policy, half)}
    for name, parameter in model.policy.named_parameters():
        assert (parameter.grad is None) == (id(parameter) in others), name


# -- rollback


def test_rollback_restores_parameters_and_optimizer_exactly():
    """With a limit below any, that is the first: parameters and optimiser end as they began."""
    model = make("discrete", torch.float64, clipping={"rollback": True}, target_kl=1e-9)
    before = parameters_of(model)
    rollout = random_rollout(model.policy, off_policy=0)
    logger = MemoryLogger()
    trainer = make_trainer(precision="64-true", logger=logger, log_every_n_steps=1)
    trainer.fit(model, FixedRollouts([rollout], model))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert not any(x.any() for state in model.optimizers().state.values() for x in state.values())
    assert model.steps.record.num_updates == 0
    assert [value for _, value in logger.rows("train/updates_taken_back")] == [1.0]


def test_rollback_of_a_later_step_restores_the_state_after_the_steps_before():
    models = []
    for options in ({"num_epochs": 1}, {"num_epochs": 3, "clipping": {"rollback": True}, "target_kl": 4e-5}):
        model = make("discrete", torch.float64, num_minibatches=1, learning_rate=1e-3, **options)
        rollout = random_rollout(model.policy, off_policy=0)  # KL divergence: 3e-5 after a step, 1e-4 after two
        make_trainer(precision="64-true").fit(model, FixedRollouts([rollout], model))
        assert model.steps.record.num_updates == 1
        models.append(model)
    states = [[x for of_one in model.optimizers().state.values() for x in of_one.values()] for model in models]
    once, rolled_back = ([*model.parameters(), *state] for model, state in zip(models, states, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(once, rolled_back, strict=True))
    assert any(x.any() for x in states[0])


def test_the_slow_implementation_also_rolled_back_an_update():
    _, slow, _, updates = learned("rollback")
    assert slow.num_taken_back == 1
    assert 2 < updates < 2 * 3 * 4


# -- adaptive learning rate


@pytest.mark.parametrize(
    ("kl", "rate"), [(0.021, 1e-3 / 1.5), (0.02, 1e-3), (0.01, 1e-3), (0.005, 1e-3), (0.0049, 1.5e-3)]
)
def test_adaptive_learning_rate_changes_outside_half_to_twice_the_target(kl, rate):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    AdaptiveLearningRate(0.01).adapt(optimizer, kl)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_adaptive_learning_rate_keeps_bounds_and_group_scales():
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.ones(1)]}], lr=1e-3)
    optimizer.param_groups[1] |= {"lr": 1e-2, "learning_rate_scale": 10.0}
    rule = AdaptiveLearningRate(0.01, factor=2.0, minimum=3e-4, maximum=5e-3)
    seen = []
    for kl in (1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0):
        rule.adapt(optimizer, kl)
        seen.append([group["lr"] for group in optimizer.param_groups])
    expected = [5e-4, 3e-4, 6e-4, 1.2e-3, 2.4e-3, 4.8e-3, 5e-3]
    assert seen == [pytest.approx([rate, 10 * rate]) for rate in expected]


@pytest.mark.parametrize(("target", "factor"), [(1e-9, 1 / 3), (1e9, 3.0)])
@pytest.mark.parametrize("separate", [False, True])
def test_adaptive_learning_rate_changes_the_actor_after_each_rollout(target, factor, separate):
    recorder = Recorder()
    adaptive = {"target_kl": target, "factor": 3.0, "minimum": 1e-9, "maximum": 10.0}
    critic = {"learning_rate": 1e-3} if separate else {}
    model = make("discrete", torch.float32, optimizer={"adaptive_learning_rate": adaptive, "critic": critic})
    rollouts = [random_rollout(model.policy, seed=seed) for seed in range(3)]
    make_trainer(callbacks=[recorder]).fit(model, FixedRollouts(rollouts, model))
    assert recorder.column("learning_rate") == pytest.approx([1e-3 * factor**n for n in (1, 2, 3)])
    if separate:
        assert model.steps.all_optimizers[1].param_groups[0]["lr"] == 1e-3


def test_adaptive_learning_rate_accepts_a_constant_schedule():
    constant = {"kind": "constant", "value": 1e-3}
    model = PPO(VECTOR, DISCRETE, learning_rate=constant, optimizer={"adaptive_learning_rate": {"target_kl": 0.01}})
    assert model.configure_optimizers().param_groups[0]["lr"] == 1e-3


# -- failures, and what is refused


@pytest.mark.parametrize("critic", [{}, {"learning_rate": 1e-3}])
def test_a_failed_value_only_update_can_be_replayed(critic, in_tmp_path):
    optimizer = {"num_value_epochs": 2, "critic": critic}
    model = BrokenLater(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}, num_epochs=1, optimizer=optimizer)
    with pytest.raises(FloatingPointError, match=r"value_loss is nan"):
        make_trainer(default_root_dir=in_tmp_path).fit(model, FixedRollouts([random_rollout(model.policy)], model))
    failed = FailedUpdate.load(in_tmp_path / "failed-update-0.pt")
    assert (failed.loss, failed.module.steps.part) == ("loss", "critic")
    again = failed.replay()
    assert again["value_loss"] != again["value_loss"]
    assert "policy_loss" not in again


class BrokenLater(PPO):
    """The value loss of the sixth minibatch is none."""

    count = 0

    def loss(self, batch: Batch) -> Loss:
        self.count += 1
        if self.count == 6:
            batch.returns[0] = float("nan")
        return super().loss(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": {"num_value_epochs": 0}}, r"optimizer.num_value_epochs=0 .* an integer of at least 1"),
        ({"clipping": {"low": 0}}, r"clipping.low=0 .* above 0"),
        ({"clipping": {"high": -1}}, r"clipping.high=-1 .* above 0"),
        ({"clipping": {"dual": 1.0}}, r"clipping.dual=1\.0 .* above 1"),
        ({"clipping": {"value_huber_delta": 0}}, r"clipping.value_huber_delta=0 .* above 0"),
        ({"advantages": {"recompute_advantages": 1}}, r"advantages.recompute_advantages=1 .* true or false"),
        ({"clipping": {"rollback": "yes"}}, r"clipping.rollback='yes' .* true or false"),
        ({"clipping": {"rollback": True}}, r"clipping.rollback=True .* a target_kl beside it"),
        (
            {"optimizer": {"adaptive_learning_rate": {}}},
            r"optimizer.adaptive_learning_rate=\{\} .* target_kl and optionally factor",
        ),
        (
            {"optimizer": {"adaptive_learning_rate": {"target_kl": 0}}},
            r"adaptive_learning_rate\.target_kl=0 .* above 0",
        ),
        ({"optimizer": {"adaptive_learning_rate": {"target_kl": 1, "factor": 1}}}, r"factor=1 .* above 1"),
        ({"optimizer": {"adaptive_learning_rate": {"target_kl": 1, "minimum": 2}}}, r"maximum=0\.01 .* at least 2"),
        (
            {"optimizer": {"adaptive_learning_rate": {"target_kl": 1}, "anneal": True}},
            r"optimizer.adaptive_learning_rate=.* null, since optimizer\.anneal is set",
        ),
        (
            {
                "optimizer": {"adaptive_learning_rate": {"target_kl": 1}},
                "learning_rate": {"kind": "linear", "start": 1, "end": 0, "over": 5},
            },
            r"optimizer.adaptive_learning_rate=.* null, since learning_rate, a schedule, is set",
        ),
        (
            {"optimizer": {"adaptive_learning_rate": {"target_kl": 0.01}}, "learning_rate": 0.05},
            r"'maximum': 0\.01\} .* minimum and maximum on either side of learning_rate, which is 0\.05",
        ),
    ],
)
def test_invalid_values_raise_in_the_constructor(options, message):
    with pytest.raises(ConfigurationError, match=message):
        PPO(VECTOR, DISCRETE, **options)
