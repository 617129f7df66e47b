"""Schedules in a run, separate critic optimizers, parameter groups, and checks of optimizers."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback

from lightning_rl import A2C, IMPALA, PPO, ActorCritic, EnvStepLimit
from lightning_rl.fast import FlatAdam
from lightning_rl.training.loss import Loss
from lightning_rl.training.optimizers import AdaptiveLearningRate
from lightning_rl.training.parameter_groups import split_parameters
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    DISCRETE,
    VECTOR,
    FixedRollouts,
    MemoryLogger,
    Recorder,
    assert_equal_parameters,
    make_data,
    make_model,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
SGD = {"name": "torch.optim.SGD"}
SCHEDULERS = "torch.optim.lr_scheduler"
STEP_LR = {"name": f"{SCHEDULERS}.StepLR", "options": {"step_size": 1}}
ROWS = 48
LINE = {"kind": "linear", "start": 1.0, "end": 0.0}


def make(algorithm: type[PPO] = PPO, **options: Any) -> PPO:
    torch.manual_seed(0)
    small: dict[str, Any] = {"policy": {"hidden_sizes": (8,)}, "num_epochs": 2, "num_minibatches": 2}
    return algorithm(VECTOR, DISCRETE, **merged(small, options)).double()


def learn(model: PPO, num_rollouts: int = 3, **trainer: Any) -> Any:
    """Train on rollouts of 48 steps and return the trainer."""
    rollouts = [random_rollout(model.policy, seed=seed) for seed in range(num_rollouts)]
    fitted = make_trainer(precision="64-true", **trainer)
    fitted.fit(model, FixedRollouts(rollouts, model))
    return fitted


def groups(model: PPO) -> list[list[dict[str, Any]]]:
    return [optimizer.param_groups for optimizer in model.steps.all_optimizers]


def rates(model: PPO) -> list[list[float]]:
    return [[group["lr"] for group in of_one] for of_one in groups(model)]


# -- schedules


class Values(Callback):
    """Records the scheduled attributes and learning rates in each update."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.rows: list[tuple[Any, ...]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        of_groups = [rate for of_one in rates(pl_module) for rate in of_one]
        self.rows.append((*(attrgetter(name)(pl_module) for name in self.names), *of_groups))


SCHEDULES: dict[str, Any] = {
    "clip_range": {"kind": "linear", "start": 0.4, "end": 0.1},
    "entropy_coef": {"kind": "piecewise", "points": [[0, 0.1], [ROWS, 0.2], [2 * ROWS, 0.4]]},
    "gae_lambda": {"kind": "linear", "start": 1.0, "end": 0.5, "over": 4 * ROWS},
    "target_kl": {"kind": "cosine", "start": 8.0, "end": 4.0, "over": 2 * ROWS},
    "clipping": {"value": {"kind": "constant", "value": 7}},
    "learning_rate": {"kind": "linear", "start": 3e-3, "end": 0},
}


def test_attributes_and_learning_rate_follow_schedules_by_env_steps():
    names = {"gae_lambda": "estimator.gae_lambda", "clipping": "clip_range_value"}
    values = Values(*(names.get(name, name) for name in SCHEDULES))
    learn(make(**SCHEDULES), callbacks=[values, EnvStepLimit(3 * ROWS)])
    assert values.rows == [
        pytest.approx((0.4, 0.1, 1.0, 8.0, 7.0, 3e-3, 3e-3)),
        pytest.approx((0.3, 0.2, 0.875, 6.0, 7.0, 2e-3, 2e-3)),
        pytest.approx((0.2, 0.4, 0.75, 4.0, 7.0, 1e-3, 1e-3)),
    ]


def test_schedule_equals_changing_the_attribute_by_hand():
    class ByHand(PPO):
        def training_step(self, rollout: Any, batch_idx: int) -> None:
            self.clip_range, self.entropy_coef = [(0.4, 0.1), (0.3, 0.2), (0.2, 0.4)][batch_idx]
            super().training_step(rollout, batch_idx)

    names = ("clip_range", "entropy_coef")
    scheduled, by_hand, constant = make(**{name: SCHEDULES[name] for name in names}), make(ByHand), make()
    for model in (scheduled, by_hand, constant):
        learn(model, callbacks=[EnvStepLimit(3 * ROWS)])
    expected = parameters_of(by_hand)
    for name, parameter in scheduled.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-12)
    assert any(not torch.equal(p, expected[name]) for name, p in constant.named_parameters())


@pytest.mark.parametrize(("algorithm", "given"), [(PPO, {}), (A2C, {"entropy_coef": 0.02}), (IMPALA, {})])
def test_a_constant_entropy_coefficient_is_logged(algorithm: type[Any], given: dict[str, float]) -> None:
    """Also after a callback has changed it."""
    torch.manual_seed(0)
    model, logger = algorithm(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}, **given).double(), MemoryLogger()
    expected = given.get("entropy_coef", {PPO: 0.0, IMPALA: 0.01}.get(algorithm))
    change = LambdaCallback(on_train_batch_end=lambda trainer, module, *_: setattr(module, "entropy_coef", 0.5))
    learn(model, logger=logger, log_every_n_steps=1, callbacks=[change, EnvStepLimit(2 * ROWS)])
    assert logger.rows("train/entropy_coef") == [(ROWS, expected), (2 * ROWS, 0.5)]


def test_scheduled_options_are_logged_and_constants_are_not():
    logger = MemoryLogger()
    model = make(**SCHEDULES)
    learn(model, logger=logger, log_every_n_steps=1, callbacks=[EnvStepLimit(3 * ROWS)])
    assert [value for _, value in logger.rows("train/clip_range")] == pytest.approx([0.4, 0.3, 0.2])
    assert [step for step, _ in logger.rows("train/clip_range")] == [ROWS, 2 * ROWS, 3 * ROWS]
    assert [value for _, value in logger.rows("train/learning_rate")] == pytest.approx([3e-3, 2e-3, 1e-3])
    assert logger.rows("train/clip_range_value") == []


def test_anneal_equals_a_linear_schedule_to_zero():
    models = [make(optimizer={"anneal": True}), make(learning_rate={"kind": "linear", "start": 3e-4, "end": 0.0})]
    for model in models:
        learn(model, callbacks=[EnvStepLimit(3 * ROWS)])
    assert_equal_parameters(models[0], parameters_of(models[1]))


def test_a2c_accepts_schedules():
    schedule = {"kind": "piecewise", "points": [[0, 0.5], [ROWS, 0.1]]}
    values = Values("entropy_coef")
    model = A2C(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}, entropy_coef=schedule, learning_rate=schedule).double()
    learn(model, 2, callbacks=[values])
    assert [row[:2] for row in values.rows] == [(0.5, 0.5), (0.1, 0.1)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("clip_range", {"clip_range": LINE}),
        ("optimizer.critic.learning_rate", {"optimizer": {"critic": {"learning_rate": LINE}}}),
    ],
)
def test_schedule_to_the_end_of_an_endless_run_is_refused(name, options):
    data = make_data()
    model = make_model(data, **options)
    expected = r"a run with an end: EnvStepLimit \(max_env_steps\) or max_epochs"
    with pytest.raises(ConfigurationError, match=rf"^{name}=.* {expected}"):
        make_trainer(max_epochs=-1).fit(model, data)


# -- two optimizers


def test_two_equal_optimizers_take_the_steps_of_one():
    one = make(optimizer={"max_grad_norm": None})
    two = make(optimizer={"max_grad_norm": None, "critic": {"learning_rate": 3e-4}})
    for model in (one, two):
        learn(model)
    assert_equal_parameters(two, parameters_of(one))
    assert [len(of_one) for of_one in groups(two)] == [1, 1]


def test_both_optimizers_are_annealed():
    model = make(learning_rate=1e-3, optimizer={"anneal": True, "critic": {"learning_rate": 0.5}})
    optimizers = model.configure_optimizers()
    model.clock.env_steps, model.clock.planned_env_steps = 75, 100
    model.schedules.apply(model.clock, optimizers)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == pytest.approx([0.25e-3, 0.125])


def test_critic_optimizer_has_its_own_class_rate_and_parameters():
    model = make(learning_rate=1e-3, optimizer={"critic": SGD | {"learning_rate": 0.5}})
    actor, critic = model.configure_optimizers()
    assert (type(actor), type(critic)) == (FlatAdam, torch.optim.SGD)
    assert (actor.defaults["lr"], critic.defaults["lr"]) == (1e-3, 0.5)
    names = {id(p): name for name, p in model.policy.named_parameters()}
    of_actor, of_critic = ([names[id(p)] for p in x.param_groups[0]["params"]] for x in (actor, critic))
    assert {name.split(".")[0] for name in of_critic} == {"critic_encoder", "value_head"}
    assert {name.split(".")[0] for name in of_actor} == {"actor_encoder", "action_head"}


def test_gradients_of_actor_and_critic_are_clipped_separately():
    """One step of SGD at rate 1 moves each half by its own clipped gradient."""
    recorder = Recorder()
    optimizer = SGD | {"max_grad_norm": 0.1, "critic": {"learning_rate": 1.0}}
    model = make(optimizer=optimizer, learning_rate=1.0, num_epochs=1, num_minibatches=1)
    before = parameters_of(model.policy)
    learn(model, 1, callbacks=[recorder])
    (row,) = recorder.rows
    for norm, starts in (("grad_norm", ("actor", "action")), ("critic_grad_norm", ("critic", "value"))):
        moves = [p - before[name] for name, p in model.policy.named_parameters() if name.startswith(starts)]
        moved = torch.cat([move.flatten() for move in moves]).norm().item()
        assert moved == pytest.approx(min(row[norm], 0.1), rel=1e-5)
    assert row["critic_grad_norm"] > 0.1


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_max_grad_value_is_applied_before_max_grad_norm(max_grad_norm):
    """One step of SGD at rate 1 moves each parameter by its clipped gradient."""
    options = {"learning_rate": 1.0, "num_epochs": 1, "num_minibatches": 1}
    gradients = {}
    for limits in ({"max_grad_norm": None}, {"max_grad_norm": max_grad_norm, "max_grad_value": 0.02}):
        model = make(optimizer=SGD | limits, **options)
        before = parameters_of(model.policy)
        learn(model, 1)
        gradients[len(limits)] = {n: before[n] - p.detach() for n, p in model.policy.named_parameters()}
    clipped = {name: gradient.clamp(-0.02, 0.02) for name, gradient in gradients[1].items()}
    norm = torch.cat([gradient.flatten() for gradient in clipped.values()]).norm()
    scale = 1.0 if max_grad_norm is None else max_grad_norm / norm
    assert scale <= 1
    assert any((gradient.abs() > 0.02).any() for gradient in gradients[1].values())
    for name, gradient in clipped.items():
        torch.testing.assert_close(gradients[2][name], gradient * scale, rtol=1e-4, atol=1e-6)


def test_update_with_two_optimizers_is_one_global_step():
    trainer = learn(make(optimizer={"critic": {"learning_rate": 1e-3}}))
    assert trainer.global_step == 3 * 2 * 2


def test_critic_updates_are_global_steps():
    """Checkpoint callbacks save only if the global step has increased."""
    trainer = learn(make(optimizer={"critic": {"learning_rate": 1e-3}, "critic_warmup_steps": 10**6}))
    assert trainer.global_step == 3 * 2 * 2


def test_critic_rate_follows_its_own_schedule_or_the_actors():
    line = {"kind": "linear", "start": 3e-3, "end": 0}
    for critic, critics in (
        ({"learning_rate": {"kind": "piecewise", "points": [[0, 1.0], [ROWS, 0.5]]}}, [1.0, 0.5, 0.5]),
        ({"learning_rate": 0.25}, [0.25] * 3),
        (SGD, [3e-3, 2e-3, 1e-3]),
    ):
        values = Values()
        learn(make(learning_rate=line, optimizer={"critic": critic}), callbacks=[values, EnvStepLimit(3 * ROWS)])
        assert [row[0] for row in values.rows] == pytest.approx([3e-3, 2e-3, 1e-3])
        assert [row[1] for row in values.rows] == pytest.approx(critics)


def test_learning_rate_of_a_separate_critic_optimizer_is_logged():
    for critic, critics in (({"learning_rate": 0.25}, [0.25, 0.25]), ({}, [])):
        logger = MemoryLogger()
        learn(make(learning_rate=0.5, optimizer={"critic": critic}), 2, logger=logger, log_every_n_steps=1)
        assert [value for _, value in logger.rows("train/learning_rate")] == [0.5, 0.5]
        assert [value for _, value in logger.rows("train/critic_learning_rate")] == critics
        assert len(logger.rows("train/critic_grad_norm")) == len(critics)


@pytest.mark.parametrize(
    "halving",
    [
        {"scheduler": {"name": "torch.optim.lr_scheduler.ExponentialLR", "options": {"gamma": 0.5}}},
        {"adaptive_learning_rate": {"target_kl": 1e-9, "factor": 2.0}},
    ],
    ids=["scheduler", "adaptive_learning_rate"],
)
def test_logged_learning_rate_is_the_rate_of_the_updates(halving):
    logger = MemoryLogger()
    learn(make(learning_rate=4e-3, optimizer=halving), logger=logger, log_every_n_steps=1)
    assert [rate for _, rate in logger.rows("train/learning_rate")] == pytest.approx([4e-3, 2e-3, 1e-3])


def test_scheduler_steps_both_optimizers():
    model = make(learning_rate=1.0, optimizer={"critic": {"learning_rate": 5.0}, "scheduler": STEP_LR})
    learn(model, 2)
    assert rates(model) == [[pytest.approx(0.01)], [pytest.approx(0.05)]]


def test_schedulers_step_in_the_warm_up_of_the_critic_without_a_warning(recwarn):
    """The actor's optimizer has taken no step before its scheduler."""
    model = make(learning_rate=1.0, optimizer={"critic": SGD, "scheduler": STEP_LR, "critic_warmup_steps": 10**6})
    learn(model, 1)
    assert rates(model) == [[pytest.approx(0.1)]] * 2
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_non_finite_gradient_of_one_optimizer_skips_both(in_tmp_path):
    class Broken(PPO):
        def loss(self, batch: Any) -> Loss:
            loss = super().loss(batch)
            loss.add_scalar("broken", (0 * self.policy.value_head.bias).sum().abs().sqrt())
            return loss

    model = make(Broken, optimizer={"critic": {"learning_rate": 1e-3}})
    before = parameters_of(model)
    with pytest.raises(FloatingPointError, match="critic_grad_norm is nan"):
        learn(model, 1)
    assert_equal_parameters(model, before)


@pytest.mark.parametrize("critic", [{"learning_rate": 1e-3}, SGD])
def test_critic_optimizer_needs_a_separate_encoder(critic):
    with pytest.raises(ConfigurationError, match=r"actor and critic share parameters: expected separate encoders"):
        make(policy={"shared_encoder": True}, optimizer={"critic": critic})


class OwnPolicy(ActorCritic):
    """Names the encoder of its critic in its own way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic_body = self.critic_encoder
        del self.critic_encoder


def test_critic_of_a_custom_policy_is_found_by_the_names_of_its_parameters():
    data = make_data()
    policy = OwnPolicy(data.observation_space, data.action_space)
    _, critic = split_parameters(policy, {}, separate=True)
    expected = [x for name, x in policy.named_parameters() if name.startswith(("critic_body", "value_head"))]
    assert set(map(id, critic[None])) == set(map(id, expected))
    for name in ("critic_body", "value_head"):
        delattr(policy, name)
    with pytest.raises(ConfigurationError, match="whose names begin with critic_ or value_"):
        split_parameters(policy, {}, separate=True)


# -- groups of parameters


def test_groups_scale_the_rate_and_set_options():
    model = make(
        optimizer={
            "name": "torch.optim.AdamW",
            "groups": {
                "critic_encoder": {"learning_rate_scale": 3.0},
                "*.bias": {"weight_decay": 0.0, "betas": [0.8, 0.9]},
                "action_head.logits": {"learning_rate_scale": 0.0},
            },
        },
        learning_rate=1e-3,
    )
    names = {id(p): name for name, p in model.policy.named_parameters()}
    made = model.configure_optimizers().param_groups
    assert [[names[id(p)] for p in group["params"]] for group in made] == [
        ["actor_encoder.layers.0.weight", "value_head.weight"],
        ["critic_encoder.layers.0.weight", "critic_encoder.layers.0.bias"],
        ["actor_encoder.layers.0.bias", "action_head.logits.bias", "value_head.bias"],
        ["action_head.logits.weight"],
    ]
    assert [group["lr"] for group in made] == [1e-3, 3e-3, 1e-3, 0.0]
    assert [(group["weight_decay"], group["betas"][0]) for group in made] == [
        *[(0.01, 0.9)] * 2,
        (0.0, 0.8),
        (0.01, 0.9),
    ]


def test_scale_0_freezes_parameters_and_schedules_keep_the_scales():
    model = make(
        learning_rate={"kind": "linear", "start": 3e-3, "end": 0},
        optimizer={"groups": {"actor_encoder": {"learning_rate_scale": 0}, "value_head": {"learning_rate_scale": 10}}},
    )
    before = parameters_of(model.policy)
    values = Values()
    learn(model, callbacks=[values, EnvStepLimit(3 * ROWS)])
    assert values.rows == [pytest.approx((r, 0.0, 10 * r)) for r in (3e-3, 2e-3, 1e-3)]
    for name, parameter in model.policy.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("actor_encoder"), name


def test_groups_are_split_between_two_optimizers():
    model = make(optimizer={"critic": {"learning_rate": 1e-2}, "groups": {"*.bias": {"learning_rate_scale": 2.0}}})
    learn(model, 1)
    assert rates(model) == [[3e-4, 6e-4], [1e-2, 2e-2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder": {}}, r"optimizer.groups='encoder' .* some of actor_encoder"),
        ({"*": {}, "value_head": {}}, r"optimizer.groups='value_head' .* that comes first"),
        ({"value_head": {"lr": 1}}, r"optimizer.groups: value_head=.* learning_rate_scale sets the rate"),
        ({"value_head": {"momentum": 1}}, r"optimizer.groups: value_head=.* options of .*\.FlatAdam, not mom"),
        ({"value_head": {"learning_rate_scale": -1}}, r"value_head: learning_rate_scale=-1 .* at least 0"),
        ({"value_head": 3}, r"optimizer.groups=.* dict of options"),
    ],
)
def test_invalid_groups_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make(optimizer={"groups": options})


@pytest.mark.parametrize("other", [{"anneal": True}, {"scheduler": {"name": "torch.optim.lr_scheduler.LRScheduler"}}])
@pytest.mark.parametrize("of_critic", [False, True])
def test_schedule_with_anneal_or_scheduler_is_refused(of_critic, other):
    name = "optimizer.critic.learning_rate" if of_critic else "learning_rate"
    options: dict[str, Any] = {"critic": {"learning_rate": LINE}} if of_critic else {}
    with pytest.raises(ConfigurationError, match=rf"^{name}=.* a number, since optimizer\.{next(iter(other))} is set"):
        make(learning_rate=1.0 if of_critic else LINE, optimizer=options | other)


def test_optimizer_that_refuses_its_arguments_raises():
    model = PPO(VECTOR, DISCRETE, optimizer=SGD | {"options": {"momentum": -1}})
    with pytest.raises(ConfigurationError, match=r"^optimizer: .*SGD refused .* Invalid momentum"):
        model.configure_optimizers()


@pytest.mark.parametrize("name", ["torch.optim.Adam", "torch.optim.RMSprop"])
def test_constructor_accepts_optimizers_of_another_device(name):
    model = PPO(VECTOR, DISCRETE, optimizer={"name": name, "options": {"capturable": True}})
    assert model.options["optimizer.name"] == name
    assert model.options["optimizer.options"] == {"capturable": True}


def test_default_bounds_and_factor_of_the_adaptive_rate_are_the_ones_of_rl_games():
    assert AdaptiveLearningRate(0.01) == AdaptiveLearningRate(0.01, factor=1.5, minimum=1e-6, maximum=1e-2)
