"""Bad hyper-parameters are refused before anything is collected: field, value and what was expected."""

import functools
from typing import Any, Never, get_type_hints

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from lightning_rl import (
    A2C,
    CLEAR,
    IMPALA,
    MAPPO,
    PPG,
    PPO,
    RND,
    VMPO,
    BehaviourCloning,
    CriticPretraining,
    OffPolicyPPG,
    OnPolicyAlgorithm,
    PPOKLPenalty,
    RolloutDataModule,
    TFAgentsPPO,
)
from lightning_rl.options import default_groups, defaults_of, flat
from lightning_rl.policies.actor_critic import check_modes_agree
from lightning_rl.spaces import space_to_dict
from lightning_rl.validation import ConfigurationError
from tests.helpers import DISCRETE, VECTOR, make_data, make_model, make_trainer, parameters_of

STEP_LR = "torch.optim.lr_scheduler.StepLR"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.01}, r"gamma=1\.01 is not valid: expected a number at least 0 and at most 1"),
        ({"gamma": float("nan")}, r"gamma=nan .* at least 0"),
        ({"gae_lambda": -0.1}, r"gae_lambda=-0\.1 .* at least 0 and at most 1"),
        ({"clip_range": 0.0}, r"clip_range=0\.0 .* above 0"),
        ({"clip_range": -0.2}, r"clip_range=-0\.2 .* above 0"),
        ({"clipping": {"value": 0}}, r"clipping.value=0 .* above 0"),
        ({"learning_rate": 0}, r"learning_rate=0 .* above 0"),
        ({"learning_rate": "fast"}, r"learning_rate='fast' .* a number above 0"),
        ({"num_epochs": 0}, r"num_epochs=0 .* an integer of at least 1"),
        ({"num_minibatches": 2.5}, r"num_minibatches=2\.5 .* an integer of at least 1"),
        ({"value_coef": -1}, r"value_coef=-1 .* at least 0"),
        ({"entropy_coef": -0.01}, r"entropy_coef=-0\.01 .* at least 0"),
        ({"optimizer": {"max_grad_norm": 0}}, r"optimizer.max_grad_norm=0 .* above 0"),
        ({"optimizer": {"max_grad_value": -1}}, r"optimizer.max_grad_value=-1 .* above 0"),
        ({"target_kl": 0.0}, r"target_kl=0\.0 .* above 0"),
        ({"advantages": {"normalize": "batch"}}, r"advantages\.normalize='batch' .* one of minibatch, rollout, none"),
        (
            {"advantages": {"on_truncation": "ignore"}},
            r"advantages\.on_truncation='ignore' .* one of bootstrap, terminal",
        ),
        ({"policy": {"network": "transformer"}}, r"policy.network='transformer' .* auto, mlp, nature, impala"),
        ({"policy": {"activation": "sine"}}, r"policy.activation='sine' .* one of tanh, relu"),
        ({"policy": {"hidden_sizes": (64, -1)}}, r"policy.hidden_sizes=-1 .* an integer of at least 1"),
        (
            {"optimizer": "torch.optim.SGD"},
            r"optimizer='torch\.optim\.SGD' .* OptimizerConfig\(\.\.\.\) or a dict of its options",
        ),
        (
            {"optimizer": {"name": lambda parameters, lr: None}},
            r"optimizer\.name=<function .* its arguments belong into",
        ),
        (
            {"optimizer": {"name": functools.partial(torch.optim.SGD, momentum=0.5)}},
            r"optimizer\.name=functools\.partial\(.* a class that can be imported, or its path",
        ),
        (
            {"optimizer": {"scheduler": {"name": "torch.optim.lr_scheduler.ReduceLROnPlateau"}}},
            r"optimizer\.scheduler\.name=.* needs no metric",
        ),
        (
            {"optimizer": {"scheduler": {"name": "torch.optim.lr_scheduler.Cosine"}}},
            r"optimizer\.scheduler\.name=.*Cosine.* cannot be imported",
        ),
        ({"policy": {"hidden_sizes": 64}}, r"policy.hidden_sizes=64 .* a list of integers"),
        (
            {
                "optimizer": {
                    "scheduler": {
                        "name": "torch.optim.lr_scheduler.LambdaLR",
                        "options": {"lr_lambda": lambda step: 1.0},
                    },
                }
            },
            r"optimizer\.scheduler\.options\.lr_lambda=<function .* cannot be stored in a checkpoint: expected numbers",
        ),
        (
            {"optimizer": {"anneal": True, "scheduler": {"name": STEP_LR, "options": {"step_size": 1}}}},
            r"optimizer\.anneal=True .* false, since optimizer\.scheduler is set",
        ),
        (
            {"optimizer": {"name": "torch.optim.Adamant"}},
            r"optimizer\.name='torch\.optim\.Adamant' cannot be imported",
        ),
        (
            {"optimizer": {"name": "torch.optim.lr_scheduler"}},
            r"optimizer\.name='torch\.optim\.lr_scheduler' .* the path of a class",
        ),
        (
            {"optimizer": {"name": "torch.optim.SGD", "options": {"lr": 1}}},
            r"optimizer\.options=\{'lr': 1\} .* set learning_rate instead",
        ),
        (
            {"optimizer": {"options": {"lr": 1}}},
            r"optimizer\.options=\{'lr': 1\} .* set learning_rate instead",
        ),
        (
            {"optimizer": {"critic": {"name": "torch.optim.SGD", "options": {"lr": 1}}}},
            r"optimizer\.critic\.options=\{'lr': 1\} .* set optimizer\.critic\.learning_rate instead",
        ),
        (
            {"optimizer": {"name": "torch.optim.SGD", "options": {"speed": 1}}},
            r"optimizer: torch\.optim\.SGD refused the arguments \{'speed': 1\}",
        ),
        (
            {"optimizer": {"name": "torch.nn.Linear"}},
            r"optimizer\.name='torch\.nn\.Linear' .* a subclass of Optimizer",
        ),
        (
            {"optimizer": {"scheduler": {"options": {"step_size": 1}}}},
            "optimizer.scheduler.options={'step_size': 1} is not valid: expected an empty dict without "
            "optimizer.scheduler.name",
        ),
        (
            {"optimizer": {"scheduler": {"name": STEP_LR}}},
            r"optimizer\.scheduler: .*StepLR refused the arguments \{\}: missing a required argument: 'step_size'",
        ),
        ({"optimizer": {"anneal": 1}}, r"optimizer.anneal=1 is not valid: expected true or false"),
        ({"policy": {"shared_encoder": "x"}}, r"policy.shared_encoder='x' is not valid: expected true or false"),
        ({"normalization": {"rewards": "maybe"}}, r"normalization.rewards='maybe' .* true or false"),
        ({"normalization": {"observations": 0}}, r"normalization.observations=0 .* true or false"),
        ({"debug": {"check_numerics": "yes"}}, r"debug.check_numerics='yes' .* true or false"),
        ({"policy": {"activation": [0]}}, r"policy.activation=\[0\] is not valid: expected one of tanh, relu"),
        (
            {"policy": {"activation": torch.nn.ReLU}},
            r"policy.activation=.*ReLU'> .* expected one of tanh, relu",
        ),
        ({"policy": {"network": "nature"}}, r"policy.network='nature' .* expected a network for .* use mlp"),
        (
            {"advantages": {"on_truncation": np.arange(2)}},
            r"advantages.on_truncation=array\(\[0, 1\]\) is not valid: expected one of bootstrap, terminal",
        ),
        ({"learning_rate": {"kind": []}}, r"learning_rate: kind=\[\] is not valid: expected one of constant, linear"),
        (
            {"policy": {"network": {"class_path": 5}}},
            r"policy\.network: class_path=5 is not valid: expected the path of a class",
        ),
        ({"optimizer": {"name": 5}}, r"optimizer\.name=5 is not valid: expected a class that can be imported"),
        (
            {"optimizer": {"name": "torch.optim.SGD", "options": 5}},
            r"optimizer\.options=5 is not valid: expected a dict of arguments",
        ),
        ({"gamma": 10**400}, r"gamma=10+ is not valid: expected a number at least 0 and at most 1"),
        ({"entropy_coef": 10**400}, r"entropy_coef=10+ is not valid: expected a number of at most 3\.4e\+38"),
        ({"learning_rate": 1e39}, r"learning_rate=1e\+39 is not valid: expected a number of at most 3\.4e\+38"),
        ({"num_epochs": 2**63}, r"num_epochs=9223372036854775808 is not valid: expected an integer of 64 bits"),
        ({"policy": {"critic_only": 1}}, r"policy.critic_only=1 is not valid: expected a list of names"),
        ({"observation_space": 3}, r"observation_space: int is not supported"),
        ({"observation_space": {"type": "Discrete", "n": -1, "start": 0}}, r"space: .* is no space"),
    ],
)
def test_invalid_values_raise_in_the_constructor(options, message):
    spaces_given = {"observation_space": VECTOR, "action_space": DISCRETE}
    with pytest.raises(ConfigurationError, match=message):
        PPO(**spaces_given | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_minibatches": 5}, r"num_minibatches=5 does not divide the 32 steps of a rollout"),
    ],
)
def test_invalid_values_raise_before_collection(options, message, monkeypatch):
    data = make_data()
    model = make_model(data, **options)
    monkeypatch.setattr(data, "collect", lambda: pytest.fail("a rollout was collected"))
    before = parameters_of(model)
    with pytest.raises(ConfigurationError, match=message):
        make_trainer().fit(model, data)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_annealing_without_an_end_raises():
    data = make_data()
    with pytest.raises(
        ConfigurationError, match=r"optimizer.anneal=True .* EnvStepLimit \(max_env_steps\) or max_epochs"
    ):
        make_trainer(max_epochs=-1).fit(make_model(data, optimizer={"anneal": True}), data)


SCHEDULED = [
    (A2C, "gae_lambda", "entropy_coef"),
    (BehaviourCloning, "entropy_coef"),
    (CriticPretraining, "vtrace_lambda"),
    (IMPALA, "vtrace_lambda", "entropy_coef"),
    (PPO, "gae_lambda", "entropy_coef", "clip_range", "target_kl"),
    (PPOKLPenalty, "adaptive_kl_target"),
    (RND, "intrinsic_coef", "extrinsic_coef"),
    (VMPO, "gae_lambda"),
]


@pytest.mark.parametrize(("algorithm", "names"), [(case[0], (*case[1:], "learning_rate")) for case in SCHEDULED])
def test_options_with_a_schedule_have_bounds_and_follow_it(algorithm, names):
    options = {"target": "vtrace"} if algorithm is CriticPretraining else {}
    for name in names:
        for value in (-0.5, 1.5) if name.endswith("lambda") else (-0.5,):
            with pytest.raises(ConfigurationError, match=rf"^{name}={value} is not valid: expected a number"):
                algorithm(VECTOR, DISCRETE, **options, **{name: value})
    schedule = {"kind": "linear", "start": 0.5, "end": 0.25, "over": 100}
    model = algorithm(VECTOR, DISCRETE, **options, **dict.fromkeys(names, schedule))
    optimizer = model.configure_optimizers()
    for steps, expected in ((0, 0.5), (100, 0.25)):
        model.clock.env_steps = steps
        model.schedules.apply(model.clock, [optimizer])
        assert optimizer.param_groups[0]["lr"] == expected
        for name in set(names) - {"learning_rate"}:
            of_estimator = name.endswith("lambda") and algorithm is not IMPALA
            assert getattr(model.estimator if of_estimator else model, name) == expected, name


class Sometimes(nn.Module):
    """An encoder with an optional layer that behaves differently in eval mode.

    Args:
        space: Of the observations.
        kind: Name of the layer's class in `torch.nn`.
        argument: Of the layer.
    """

    def __init__(self, space: spaces.Space[Any], kind: str, argument: float) -> None:
        super().__init__()
        self.out_features = 4
        self.layer = getattr(nn, kind)(argument)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layer(observations)


@pytest.mark.parametrize(
    ("kind", "argument", "refused"),
    [
        ("Dropout", 0.1, True),
        ("AlphaDropout", 0.1, True),
        ("BatchNorm1d", 4, True),
        ("RReLU", 0.1, True),
        ("Dropout", 0.0, False),
        ("LayerNorm", 4, False),
    ],
)
def test_layers_with_other_behavior_in_eval_mode_raise(kind, argument, refused):
    data = make_data()
    network = {"class_path": f"{__name__}.Sometimes", "init_args": {"kind": kind, "argument": argument}}
    model, trainer = make_model(data, policy={"network": network}), make_trainer()
    if not refused:
        trainer.fit(model, data)
        return
    with pytest.raises(ConfigurationError, match=rf"policy: actor_encoder\.layer={kind}\(.* no dropout or batch"):
        trainer.fit(model, data)
    assert model.env_steps == 0


class Attending(nn.Module):
    """Encoder with attention over a sequence of one step."""

    def __init__(self, space: spaces.Space[Any], dropout: float) -> None:
        super().__init__()
        self.out_features = 4
        self.layer = nn.MultiheadAttention(4, 2, dropout=dropout)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        rows = observations.unsqueeze(0)
        return self.layer(rows, rows, rows, need_weights=False)[0].squeeze(0)


@pytest.mark.parametrize(("dropout", "refused"), [(0.1, True), (0.0, False)])
def test_dropout_inside_of_attention_raises(dropout, refused):
    network = {"class_path": f"{__name__}.Attending", "init_args": {"dropout": dropout}}
    policy = make_model(make_data(), policy={"network": network}).policy
    if not refused:
        check_modes_agree(policy)
        return
    with pytest.raises(ConfigurationError, match=r"(?s)actor_encoder\.layer=MultiheadAttention.* no dropout"):
        check_modes_agree(policy)


@pytest.mark.parametrize("algorithm", [PPO, A2C, OffPolicyPPG, TFAgentsPPO])
def test_unknown_options_raise_with_algorithm_and_suggestion(algorithm):
    with pytest.raises(ConfigurationError) as caught:
        algorithm(VECTOR, DISCRETE, learning_rat=3e-4)
    begin = f"learning_rat=0.0003 is no option of {algorithm.__name__}; did you mean learning_rate or"
    assert str(caught.value).startswith(begin)
    with pytest.raises(ConfigurationError) as caught:
        algorithm(VECTOR, DISCRETE, xyz=1)
    begin, _, listed = str(caught.value).partition(f"; {algorithm.__name__} has ")
    assert begin == f"xyz=1 is no option of {algorithm.__name__}"
    assert {"learning_rate", "value_coef", "entropy_coef", "optimizer"} <= set(listed.split(", "))


def test_custom_algorithms_can_remove_their_options_from_kwargs():
    class Own(PPO):
        def __init__(self, *args: Any, width: int = 8, **kwargs: Any) -> None:
            self.depth = kwargs.pop("depth", 1)
            super().__init__(*args, policy={"hidden_sizes": (width,) * self.depth}, **kwargs)

    assert Own(VECTOR, DISCRETE, width=4, depth=2).options["policy.hidden_sizes"] == [4, 4]
    with pytest.raises(ConfigurationError, match="widht=4 is no option of Own; did you mean width"):
        Own(VECTOR, DISCRETE, widht=4)


@pytest.mark.parametrize("made", [OnPolicyAlgorithm, RolloutDataModule])
def test_type_checkers_refuse_unknown_options_too(made):
    assert get_type_hints(made.__init__)["unknown"] is Never


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"observation_space": spaces.Box(-1, 1, (4,))},
            r"observation_space=Box.* does not fit the checkpoint: expected Box",
        ),
        ({"action_space": spaces.Discrete(5)}, r"action_space=Discrete\(5\) does not fit .* expected Discrete\(3\)"),
    ],
)
def test_checkpoints_of_other_spaces_raise(other, message):
    own: dict[str, Any] = {"observation_space": VECTOR, "action_space": DISCRETE}
    stored, loading = PPO(**own), PPO(**own | other)
    checkpoint: dict[str, Any] = {"hyper_parameters": dict(stored.hparams), "state_dict": stored.state_dict()}
    stored.on_save_checkpoint(checkpoint)
    with pytest.raises(ConfigurationError, match=message):
        loading.on_load_checkpoint(checkpoint)
    stored.on_load_checkpoint(checkpoint)


@pytest.mark.parametrize("name", [torch.optim.SGD, "torch.optim.SGD"], ids=["class", "path"])
@pytest.mark.parametrize("arguments", [{}, {"momentum": 0.5}])
def test_optimizers_in_any_form_are_stored_as_plain_data(name, arguments):
    model = PPO(VECTOR, DISCRETE, optimizer={"name": name, "options": arguments}, learning_rate=0.25)
    made = model.configure_optimizers()
    assert type(made) is torch.optim.SGD
    assert made.defaults["lr"] == 0.25
    assert made.defaults["momentum"] == arguments.get("momentum", 0)
    assert model.hparams["optimizer"]["name"] in ("torch.optim.SGD", "torch.optim.sgd.SGD")
    assert model.hparams["optimizer"]["options"] == arguments


def test_hyper_parameters_are_plain_data():
    model = PPO(
        VECTOR,
        DISCRETE,
        learning_rate=np.float64(1e-3),
        optimizer={"name": torch.optim.Adam, "options": {"betas": (0.9, np.float32(0.5))}},
        policy={"hidden_sizes": (8,), "network": "mlp"},
    )
    assert model.hparams["optimizer"]["options"] == {"betas": [0.9, 0.5]}
    assert model.hparams["observation_space"] == space_to_dict(VECTOR)
    assert model.hparams["policy"]["hidden_sizes"] == [8]

    def leaves(x: Any) -> Any:
        if isinstance(x, dict):
            return [leaf for value in x.values() for leaf in leaves(value)]
        return [leaf for value in x for leaf in leaves(value)] if isinstance(x, list) else [x]

    assert leaves(dict(model.hparams))
    assert {type(leaf) for leaf in leaves(dict(model.hparams))} <= {int, float, str, bool, type(None)}


def test_defaults_are_the_numbers_of_the_papers_or_the_code_of_their_authors():
    policy_gradient = {"gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2, "optimizer.max_grad_norm": 0.5}
    v_trace = {"learning_rate": 6e-4, "gamma": 0.99, "value_coef": 0.5, "entropy_coef": 0.01, "reduction": "mean"}
    v_trace |= {"vtrace_lambda": 1.0, "clip_rho": 1.0, "clip_c": 1.0, "clip_pg_rho": 1.0, "vtrace_leak": 0.0}
    expected: dict[type[OnPolicyAlgorithm], dict[str, Any]] = {
        PPO: {"learning_rate": 3e-4, "value_coef": 0.5, "advantages.normalize": "minibatch", **policy_gradient},
        A2C: {"learning_rate": 7e-4, "gae_lambda": 1.0, "entropy_coef": 0.01, "advantages.normalize": "none"},
        VMPO: {"temperature_epsilon": 0.1, "initial_temperature": 1.0, "kl_epsilon": 0.01, "initial_kl_coef": 5.0},
        PPG: {
            **{"learning_rate": 5e-4, "gamma": 0.999, "gae_lambda": 0.95, "clip_range": 0.2, "value_coef": 1.0},
            **{"entropy_coef": 0.01, "num_epochs": 1, "num_minibatches": 8, "optimizer.max_grad_norm": None},
            **{"advantages.normalize": "rollout", "num_policy_iterations": 32, "num_aux_epochs": 6},
            **{"cloning_coef": 1.0, "aux_value_coef": 1.0, "separate_aux_optimizer": True, "kl_penalty_coef": 0.0},
        },
        IMPALA: v_trace,
        CLEAR: {**v_trace, "replay_ratio": 1.0, "policy_cloning_coef": 0.01, "value_cloning_coef": 0.005},
        MAPPO: {
            **{**policy_gradient, "num_epochs": 10, "num_minibatches": 1, "entropy_coef": 0.01},
            **{"optimizer.max_grad_norm": 10.0, "clipping.value_huber_delta": 10.0, "normalization.values": "popart"},
            **{"policy.activation": "relu", "policy.hidden_sizes": (64, 64), "share_policy": True},
        },
        RND: {"gamma": 0.999, "intrinsic_gamma": 0.99, "extrinsic_coef": 2.0, "intrinsic_coef": 1.0}
        | {"predictor_fraction": 0.25, "num_epochs": 4, "num_minibatches": 4},
        BehaviourCloning: {"entropy_coef": 0.0},  # maximum likelihood alone
    }
    for algorithm, numbers in expected.items():
        defaults = flat(defaults_of(algorithm), default_groups(algorithm))
        assert {name: defaults[name] for name in numbers} == numbers, algorithm.__name__


@pytest.mark.parametrize(
    ("algorithm", "kind", "arguments"),
    [
        (PPO, torch.optim.Adam, {"eps": 1e-5}),
        (A2C, torch.optim.RMSprop, {"alpha": 0.99, "eps": 1e-5, "momentum": 0}),
        (IMPALA, torch.optim.RMSprop, {"alpha": 0.99, "eps": 0.01, "momentum": 0}),
        (CLEAR, torch.optim.RMSprop, {"alpha": 0.99, "eps": 0.01, "momentum": 0}),
    ],
)
def test_default_optimizers_are_the_ones_of_the_papers_or_the_code_of_their_authors(algorithm, kind, arguments):
    optimizer: Any = algorithm(VECTOR, DISCRETE).configure_optimizers()
    assert isinstance(optimizer, kind)
    assert {name: optimizer.defaults[name] for name in arguments} == arguments
