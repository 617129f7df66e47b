"""Distillation: the student imitates the teacher where it goes itself, beside PPO, by schedules."""

import re

import pytest
import torch

from lightning_rl import PPO, Distillation
from lightning_rl.validation import ConfigurationError
from tests.helpers import MemoryLogger, assert_equal_parameters, make_data, make_trainer, merged, parameters_of

PARTS = {"position": [0, 2], "velocity": [1, 3]}
SPLIT = {"class_path": "lightning_rl.environments.SplitObservation", "init_args": {"parts": PARTS}}
SMALL = {"policy": {"hidden_sizes": (16,)}, "num_epochs": 2, "num_minibatches": 2}
LSTM = {"policy": {"memory": {"kind": "lstm", "hidden_size": 8}, "critic_only": ["velocity"]}}


def data_of(**options):
    return make_data("CartPole-v1", env={"wrappers": [SPLIT]}, **options)


def saved(path, data, kind=PPO, **options):
    """Return the path of a checkpoint of a teacher, and the teacher."""
    torch.manual_seed(7)
    model = kind(data.observation_space, data.action_space, **merged(SMALL, options))
    with torch.no_grad():
        for parameter in model.policy.action_head.parameters():
            parameter.mul_(100)  # far from uniform
    trainer = make_trainer()
    trainer.strategy.connect(model)
    trainer.save_checkpoint(path)
    return str(path), model


@pytest.fixture
def teacher(tmp_path):
    return saved(tmp_path / "teacher.ckpt", data_of())[0]


def make_student(data, teacher, **options):
    torch.manual_seed(0)
    return Distillation(data.observation_space, data.action_space, teacher=teacher, **merged(SMALL, options))


def rollout_of(data, model):
    """Return a rollout, and leave the model as it is."""
    rollouts = []
    trainer = make_trainer(limit_train_batches=1)
    module = PPO(data.observation_space, data.action_space, **SMALL | {"num_epochs": 1})
    module.policy = model.policy
    module.on_train_batch_start = lambda batch, _: rollouts.append(batch.clone())
    module.update = lambda rollout: module.steps.observe(nothing=torch.tensor(0.0))
    trainer.fit(module, data)
    return rollouts[0]


def test_loss_is_ppo_and_the_divergence_from_the_teacher(teacher):
    data = data_of()
    student = make_student(data, teacher, rl_coef=0.5, distillation_coef=3.0, entropy_coef=0.1)
    plain = PPO(data.observation_space, data.action_space, **merged(SMALL, {"entropy_coef": 0.1}))
    plain.policy = student.policy
    rollout = rollout_of(data, student)
    batch = student.batch(rollout, more=rollout.actions)
    assert torch.equal(batch.more, batch.actions)
    loss, ppo = student.loss(batch), plain.loss(batch)
    assert all(torch.equal(loss.metrics[name], x) for name, x in ppo.metrics.items())
    with torch.no_grad():
        logits, own = (p(batch.observations)[0].parameters() for p in (student.teacher, student.policy))
        p, q = (
            next(iter(x.values())).log_softmax(-1) if isinstance(x, dict) else x.log_softmax(-1) for x in (logits, own)
        )
    kl = (p.exp() * (p - q)).sum(-1).mean()
    assert kl > 0.01
    torch.testing.assert_close(loss.metrics["distillation_loss"], kl)
    value = 0.5 * ppo.metrics["value_loss"]
    torch.testing.assert_close(loss.total, 0.5 * (ppo.total - value) + value + 3 * kl)


def test_distillation_alone_makes_the_student_act_like_the_teacher(teacher):
    data, logger = data_of(rollouts_per_epoch=16), MemoryLogger()
    student = make_student(data, teacher, rl_coef=0.0, learning_rate=1e-2)
    make_trainer(logger=logger, log_every_n_steps=1).fit(student, data)
    losses = [value for _, value in logger.rows("train/distillation_loss")]
    assert losses[-1] < losses[0] / 5


def test_teacher_computes_each_step_of_a_rollout_once(teacher):
    data = data_of()
    student, rows = make_student(data, teacher, num_epochs=3), []
    student.teacher.register_forward_hook(lambda module, given, output: rows.append(output[1].numel()))
    make_trainer().fit(student, data)
    assert sum(rows) == student.env_steps > 0


def test_coefficients_follow_schedules_and_end_in_the_gradient_of_ppo(teacher):
    def ramp(*points):
        return {"kind": "piecewise", "points": [list(point) for point in points]}

    data, logger = data_of(rollouts_per_epoch=3), MemoryLogger()
    schedules = {"rl_coef": ramp((0, 0.0), (64, 1.0)), "distillation_coef": ramp((0, 1.0), (64, 0.0))}
    student = make_student(data, teacher, **schedules)
    make_trainer(logger=logger, log_every_n_steps=1).fit(student, data)
    assert [value for _, value in logger.rows("train/rl_coef")] == [0, 0, 1]
    assert [value for _, value in logger.rows("train/distillation_coef")] == [1, 1, 0]
    plain = PPO(data.observation_space, data.action_space, **SMALL)
    plain.policy = student.policy
    batch = student.batch(rollout_of(data, student))
    torch.testing.assert_close(student.loss(batch).total, plain.loss(batch).total)


@pytest.mark.parametrize("separate", [True, None])
def test_recurrent_student_does_not_see_what_the_teacher_sees(teacher, separate):
    data = data_of()
    student = make_student(data, teacher, **merged(LSTM, {"policy": {"memory": {"separate": separate}}}))
    make_trainer().fit(student, data)
    assert student.policy.actor_encoder.out_features == 16
    observation = {"position": data.observation_space["position"].sample()}
    action, memory = student.act(observation)
    assert action in (0, 1) and memory is not None


def test_checkpoints_have_no_teacher_and_load_without_its_file(teacher, tmp_path):
    data = data_of()
    student = make_student(data, teacher)
    trainer = make_trainer()
    trainer.fit(student, data)
    assert not any("teacher" in name for name, _ in student.named_parameters())
    trainer.save_checkpoint(path := tmp_path / "student.ckpt")
    (tmp_path / "teacher.ckpt").unlink()
    assert_equal_parameters(Distillation.load_from_checkpoint(path), parameters_of(student))
    with pytest.raises(ConfigurationError, match="teacher="):
        make_trainer(max_epochs=2).fit(make_student(data_of(), teacher), data_of(), ckpt_path=path)


@pytest.mark.parametrize("options", [{}, LSTM])
def test_resumed_run_is_equal_bit_for_bit(teacher, tmp_path, options):
    def run(epochs, ckpt_path=None):
        data = data_of(rollouts_per_epoch=1)
        student = make_student(
            data, teacher, **merged(options, {"rl_coef": {"kind": "linear", "start": 0, "end": 1, "over": 90}})
        )
        trainer = make_trainer(max_epochs=epochs)
        trainer.fit(student, data, ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return student

    whole = run(4)
    run(2)
    assert_equal_parameters(run(4, tmp_path / "2.ckpt"), parameters_of(whole))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"env": {"wrappers": []}}, {}, "observation_space="),
        ({}, {"policy": {"memory": "gru"}}, "policy.memory="),
        ({}, {"policy": {"action_distribution": "tf_agents_categorical"}}, "policy.action_distribution="),
    ],
)
def test_teacher_that_does_not_fit_is_refused_before_training(tmp_path, given, options, message):
    data = data_of()
    path, _ = saved(
        tmp_path / "other.ckpt", make_data("CartPole-v1", **merged({"env": {"wrappers": [SPLIT]}}, given)), **options
    )
    student = make_student(data, path)
    with pytest.raises(ConfigurationError, match=re.escape(f"teacher={str(path)!r}: {message}")):
        make_trainer().fit(student, data)
    assert student.env_steps == 0


def test_policy_of_a_teacher_needs_no_attribute_memory(tmp_path, monkeypatch):
    data = data_of()
    path, model = saved(tmp_path / "teacher.ckpt", data)
    del model.policy.memory  # as in a policy of an own class
    monkeypatch.setattr(PPO, "load_from_checkpoint", lambda *_, **__: model)
    assert make_student(data, path).teacher is model.policy


def test_error_in_a_teacher_of_an_own_class_is_not_hidden():
    class Student(Distillation):
        @property
        def teacher(self):
            return torch.MyPPO.load_from_checkpoint(self.options["teacher"]).policy

    data = data_of()
    student = Student(data.observation_space, data.action_space, teacher="teacher.ckpt")
    with pytest.raises(AttributeError, match="MyPPO"):
        make_trainer().fit(student, data)


@pytest.mark.parametrize("option", ["rl_coef", "distillation_coef"])
def test_negative_coefficients_are_refused(teacher, option):
    with pytest.raises(ConfigurationError, match=f"{option}=-1"):
        make_student(data_of(), teacher, **{option: -1})
