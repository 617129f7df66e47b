"""Options in groups: which fields a dict changes, what is stored of them, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rl import A2C, CLEAR, IMPALA, PPG, PPO, VMPO, OffPolicyPPG, OnPolicyAlgorithm, OverlappedPPO, TFAgentsPPO
from lightning_rl.algorithms.ppo import ClippingConfig
from lightning_rl.checkpointing.format import read_checkpoint
from lightning_rl.training.config import OptimizerConfig
from lightning_rl.validation import ConfigurationError
from tests.helpers import DISCRETE, VECTOR, make_data, make_model, make_trainer, parameters_of

SMALL: dict[str, Any] = {"policy": {"hidden_sizes": (8,)}}


def saved(model: OnPolicyAlgorithm, folder: Path) -> Path:
    path = folder / "model.ckpt"
    trainer = make_trainer()
    trainer.strategy.connect(model)
    trainer.save_checkpoint(path)
    return path


# -- in Python


def test_a_dict_changes_single_fields_of_the_default_of_the_algorithm():
    model = A2C(VECTOR, DISCRETE, optimizer={"max_grad_norm": 1.0})
    assert type(model.configure_optimizers()) is torch.optim.RMSprop
    assert model.steps.max_grad_norm == 1.0
    ppg = PPG(VECTOR, DISCRETE, optimizer={"anneal": True}, advantages={"recompute_values": True})
    assert ppg.options["optimizer.max_grad_norm"] is None
    assert ppg.options["advantages.normalize"] == "rollout"
    preset = TFAgentsPPO(VECTOR, DISCRETE, advantages={"normalize": "none"}, normalization={"update": "before"})
    assert preset.options["advantages.estimator"] == "monte_carlo"
    assert preset.options["advantages.on_truncation"] == "terminal"
    assert preset.options["normalization.rewards"] == "reward_std"


def test_a_dict_inside_a_dict_changes_single_fields_too():
    model = PPO(VECTOR, DISCRETE, optimizer={"l2": {"policy": 0.1}, "critic": {"learning_rate": 1e-3}})
    l2 = {part: model.options[f"optimizer.l2.{part}"] for part in ("policy", "value", "shared")}
    assert l2 == {"policy": 0.1, "value": 0.0, "shared": 0.0}
    assert len(model.configure_optimizers()) == 2


def test_options_without_a_name_change_single_arguments_of_the_default_optimizer():
    defaults = A2C(VECTOR, DISCRETE, optimizer={"options": {"eps": 0.5}}).configure_optimizers().defaults
    assert (defaults["eps"], defaults["alpha"]) == (0.5, 0.99)


def test_a_group_replaces_all_fields():
    model = PPG(VECTOR, DISCRETE, optimizer=OptimizerConfig(anneal=True), clipping=ClippingConfig(dual=2.0))
    assert model.options["optimizer.max_grad_norm"] == 0.5
    assert model.dual_clip == 2.0


# -- subclasses


class WithDicts(PPG):
    """Changes single fields of the defaults of PPG."""

    def __init__(
        self,
        *args: Any,
        optimizer: dict[str, Any] = {"anneal": True},  # noqa: B006
        clipping: dict[str, Any] = {"dual": 3.0},  # noqa: B006
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, optimizer=optimizer, clipping=clipping, **kwargs)


def test_the_default_of_a_subclass_may_be_a_dict(tmp_path):
    model = WithDicts(VECTOR, DISCRETE)
    assert (model.options["optimizer.anneal"], model.options["optimizer.max_grad_norm"]) == (True, None)
    assert model.dual_clip == 3.0
    model = WithDicts(VECTOR, DISCRETE, optimizer={"max_grad_norm": 1.0}, clipping={"value": 0.2})
    assert (model.options["optimizer.anneal"], model.options["optimizer.max_grad_norm"]) == (True, 1.0)
    assert (model.dual_clip, model.clip_range_value) == (3.0, 0.2)
    assert WithDicts.load_from_checkpoint(saved(model, tmp_path)).options == model.options


class Doubling(PPO):
    """Passes on twice the given values."""

    def __init__(
        self,
        *args: Any,
        gamma: float = 0.4,
        num_epochs: int = 2,
        optimizer: dict[str, Any] = {"max_grad_norm": 1.0},  # noqa: B006
        clipping: dict[str, Any] = {"dual": 2.0},  # noqa: B006
        **kwargs: Any,
    ) -> None:
        super().__init__(
            *args,
            gamma=2 * gamma,
            num_epochs=2 * num_epochs,
            optimizer=optimizer | {"max_grad_norm": 2 * optimizer["max_grad_norm"]},
            clipping=clipping | {"dual": 2 * clipping["dual"]},
            **kwargs,
        )


def test_subclasses_can_pass_other_values_while_the_given_values_are_stored(tmp_path):
    model = Doubling(VECTOR, DISCRETE, optimizer={"max_grad_norm": 1.5})
    for one in (model, Doubling.load_from_checkpoint(saved(model, tmp_path))):
        assert (one.estimator.gamma, one.num_epochs, one.steps.max_grad_norm, one.dual_clip) == (0.8, 4, 3.0, 4.0)
        assert (one.options["gamma"], one.options["num_epochs"]) == (0.8, 4)
        assert (one.options["optimizer.max_grad_norm"], one.options["clipping.dual"]) == (3.0, 4.0)
        assert (one.hparams["gamma"], one.hparams["num_epochs"]) == (0.4, 2)
        assert one.hparams["optimizer"]["max_grad_norm"] == 1.5
        assert one.hparams["clipping"]["dual"] == 2.0
    with pytest.raises(ConfigurationError, match=r"clipping\.dual=0\.5 .* above 1"):
        Doubling(VECTOR, DISCRETE, clipping={"dual": 0.5})


# -- checkpoints


def test_checkpoints_hold_groups_as_plain_nested_dicts(tmp_path):
    model = PPO(VECTOR, DISCRETE, **SMALL, optimizer={"name": torch.optim.SGD, "l2": {"policy": 0.1}})
    stored = read_checkpoint(saved(model, tmp_path), "checkpoint")["hyper_parameters"]
    assert stored["policy"]["hidden_sizes"] == [8] and stored["policy"]["activation"] == "tanh"
    assert stored["optimizer"]["name"] == "torch.optim.sgd.SGD"
    assert stored["optimizer"]["l2"] == {"policy": 0.1, "value": 0.0, "shared": 0.0}
    assert stored["optimizer"]["max_grad_norm"] == 0.5
    assert not any("." in name for name in stored)

    def kinds(x: Any) -> set[type]:
        parts = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
        return {type(x)}.union(*map(kinds, parts))

    assert kinds(dict(stored)) <= {dict, list, int, float, str, bool, type(None)}


def test_loading_changes_single_fields_of_a_stored_group(tmp_path):
    given = {"max_grad_norm": 2.0, "l2": {"policy": 0.1}}
    path = saved(PPG(VECTOR, DISCRETE, **SMALL, optimizer=given), tmp_path)
    assert PPG.load_from_checkpoint(path).options["optimizer.max_grad_norm"] == 2.0
    loaded = PPG.load_from_checkpoint(path, optimizer={"anneal": True, "l2": {"value": 0.2}}, policy={})
    names = ("anneal", "max_grad_norm", "l2.policy", "l2.value")
    assert [loaded.options[f"optimizer.{name}"] for name in names] == [True, 2.0, 0.1, 0.2]
    assert loaded.options["policy.hidden_sizes"] == [8]
    with pytest.raises(ConfigurationError, match=r"optimizer\.max_grad_nrm=1 is no option; did you mean max_grad_norm"):
        PPG.load_from_checkpoint(path, optimizer={"max_grad_nrm": 1})


# -- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": {"max_grad_nrm": 1}}, r"optimizer\.max_grad_nrm=1 is no option; did you mean max_grad_norm"),
        ({"optimizer": {"l2": {"polcy": 1}}}, r"optimizer\.l2\.polcy=1 is no option; did you mean policy\?"),
        ({"clipping": {"xyz": 1}}, r"clipping\.xyz=1 is no option; clipping has low, high, log_prob"),
        ({"debug": {3: 1}}, r"debug\.3=1 is no option; debug has check_numerics"),
        ({"advantages": 3}, r"advantages=3 .* AdvantageConfig\(\.\.\.\) or a dict of its options"),
        ({"optimizer": {"l2": 0.1}}, r"optimizer\.l2=0\.1 .* L2Config\(\.\.\.\) or a dict of its options"),
        ({"policy": OptimizerConfig()}, r"policy=OptimizerConfig\(.* PolicyConfig\(\.\.\.\) or a dict"),
    ],
)
def test_unknown_fields_of_a_group_raise_with_a_suggestion(options, message):
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        PPO(VECTOR, DISCRETE, **options)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("hidden_sizes", "policy.hidden_sizes"),
        ("max_grad_norm", "optimizer.max_grad_norm"),
        ("critic_learning_rate", "optimizer.critic.learning_rate"),
        ("policy_l2", "optimizer.l2.policy"),
        ("lr_scheduler", "optimizer.scheduler.name"),
        ("normalize_observations", "normalization.observations"),
        ("log_prob_clip", "clipping.log_prob"),
        ("dual_clip", "clipping.dual"),
        ("value_clip", "clipping.value"),
        ("normalize_advantage", "advantages.normalize"),
        ("reward_normalization", "normalization.rewards"),
        ("kl_rollback", "clipping.rollback"),
        ("fast_paths", "debug.fast_paths"),
    ],
)
def test_the_name_of_an_option_without_its_group_suggests_the_full_name(name, full):
    with pytest.raises(ConfigurationError, match=rf"^{name}=1 is no option of PPO; did you mean {full}( or .*)?\?$"):
        PPO(VECTOR, DISCRETE, **{name: 1})


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (A2C, {"optimizer": {"num_value_epochs": 2}}, r"num_value_epochs=2 .* None: A2C makes one gradient step"),
        (IMPALA, {"advantages": {"normalize": "rollout"}}, r"normalize='rollout' .* 'none': V-trace advantages"),
        (CLEAR, {"advantages": {"value_target": "empirical"}}, r"value_target='empirical' .* 'td_lambda': V-trace"),
        (VMPO, {"optimizer": {"critic_warmup_steps": 1}}, r"critic_warmup_steps=1 .* 0: V-MPO's passes"),
        (OverlappedPPO, {"normalization": {"update": "before"}}, r"update='before' .* 'after': V-trace needs"),
        (OffPolicyPPG, {"policy": {"memory": "gru"}}, r"memory='gru' .* None: steps are drawn one by one"),
        (TFAgentsPPO, {"advantages": {"on_truncation": "bootstrap"}}, r"='bootstrap' .* 'terminal': TF-Agents takes"),
    ],
)
def test_options_without_effect_raise_with_the_reason(algorithm, options, message):
    ((group, fields),) = options.items()
    (field,) = fields
    with pytest.raises(ConfigurationError, match=message) as caught:
        algorithm(VECTOR, DISCRETE, **options)
    assert str(caught.value).startswith(f"{group}.{field}=")


@pytest.mark.parametrize("algorithm", [A2C, IMPALA, CLEAR, VMPO, OverlappedPPO, OffPolicyPPG, TFAgentsPPO])
def test_options_without_effect_accept_their_default(algorithm):
    """Like a configuration with all options."""
    plain = algorithm(VECTOR, DISCRETE)
    options = {name: x for name, x in plain.hparams.items() if name not in ("observation_space", "action_space")}
    assert algorithm(VECTOR, DISCRETE, **options).options == plain.options


# -- the size of minibatches


@pytest.mark.parametrize("memory", [None, {"kind": "gru", "hidden_size": 4, "sequence_length": 8}])
def test_minibatch_size_equals_the_matching_num_minibatches(memory):
    ends = []
    for cut in ({"num_minibatches": 4}, {"num_minibatches": None, "minibatch_size": 8}):
        data = make_data()  # rollouts of 32 steps
        model = make_model(data, policy={"memory": memory}, **cut)
        trainer = make_trainer()
        trainer.fit(model, data)
        assert trainer.global_step == 2 * 2 * 4
        ends.append(parameters_of(model))
    for end in ends[1:]:
        assert all(torch.equal(parameter, end[name]) for name, parameter in ends[0].items())


@pytest.mark.parametrize("size", [7, 33, 64])
def test_a_minibatch_size_that_does_not_divide_the_rollout_raises(size):
    data = make_data()
    model = make_model(data, num_minibatches=None, minibatch_size=size)
    expected = rf"^minibatch_size={size} is not valid: expected a divisor of the 32 steps of a rollout"
    with pytest.raises(ConfigurationError, match=expected):
        make_trainer().fit(model, data)
    assert model.env_steps == 0
    with pytest.raises(
        ConfigurationError, match=f"^minibatch_size={size} is .* (divisor of|no more than) batch_size=32"
    ):
        OffPolicyPPG(VECTOR, DISCRETE, batch_size=32, num_minibatches=None, minibatch_size=size)


@pytest.mark.parametrize("size", [4, 7, 64])
def test_a_minibatch_size_that_cuts_sequences_of_a_recurrent_policy_raises(size):
    data, memory = make_data(), {"kind": "gru", "sequence_length": 8}
    model = make_model(data, policy={"memory": memory}, num_minibatches=None, minibatch_size=size)
    expected = rf"^minibatch_size={size} is not valid: .* of the 32 steps .* a multiple of the 8 steps of a sequence"
    with pytest.raises(ConfigurationError, match=expected):
        make_trainer().fit(model, data)
    assert model.env_steps == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minibatch_size": 0}, r"minibatch_size=0 .* an integer of at least 1"),
        ({"minibatch_size": 2.5}, r"minibatch_size=2\.5 .* an integer of at least 1"),
        ({"num_minibatches": 8, "minibatch_size": 64}, r"num_minibatches=8 .* None with minibatch_size=64"),
        ({"num_minibatches": None}, r"num_minibatches=None .* an integer, unless minibatch_size is set"),
    ],
)
def test_invalid_minibatch_sizes_raise(options, message):
    with pytest.raises(ConfigurationError, match=message):
        PPO(VECTOR, DISCRETE, **options)


def test_auxiliary_phases_have_as_many_minibatches_as_policy_phases_with_minibatch_size():
    ends = []
    for cut in ({"num_minibatches": 4}, {"minibatch_size": 8}):
        data = make_data(rollouts_per_epoch=2)
        torch.manual_seed(0)
        options = {"num_policy_iterations": 2, "num_aux_epochs": 3}
        model = PPG(data.observation_space, data.action_space, **SMALL, **options, **cut)
        trainer = make_trainer()
        trainer.fit(model, data)
        # Two rollouts in 4 minibatches each, then three passes over both in 2 x 4 minibatches.
        assert trainer.global_step == 2 * 4 + 3 * 2 * 4
        ends.append(parameters_of(model))
    assert all(torch.equal(parameter, ends[1][name]) for name, parameter in ends[0].items())


class WithRequiredOption(PPO):
    """An algorithm with an option that has no default."""

    def __init__(self, *args: Any, goal: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.goal = goal


def test_algorithm_with_a_required_option_is_loaded(tmp_path):
    path = saved(WithRequiredOption(VECTOR, DISCRETE, goal=3, **SMALL), tmp_path)
    assert WithRequiredOption.load_from_checkpoint(path).goal == 3


def test_a_checkpoint_of_another_algorithm_is_named_when_loading(tmp_path):
    path = saved(PPO(VECTOR, DISCRETE, **SMALL), tmp_path)
    message = r"^checkpoint_path='.*model.ckpt' is a checkpoint of PPO, not of A2C: use PPO.load_from_checkpoint$"
    with pytest.raises(ConfigurationError, match=message):
        A2C.load_from_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["hyper_parameters"]["_class_path"] = "lightning_rl.PPO"  # as Lightning's command line saves it
    torch.save(checkpoint, path)
    with pytest.raises(ConfigurationError, match=message):
        A2C.load_from_checkpoint(path)
    # PPO has all options of A2C.
    path = saved(A2C(VECTOR, DISCRETE), tmp_path)
    with pytest.raises(ConfigurationError, match=r"is a checkpoint of A2C, not of PPO: use A2C.load_from_checkpoint$"):
        PPO.load_from_checkpoint(path)


def test_initials_and_other_names_of_an_option_are_understood():
    with pytest.raises(ConfigurationError, match=r"^lr=0\.001 is no option of PPO; did you mean learning_rate or"):
        PPO(VECTOR, DISCRETE, lr=1e-3)
