"""Packing and unpacking of rollouts, and rollouts that are too old."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_rl import IMPALA
from lightning_rl.data import actors
from lightning_rl.data.actors import ActorConfig, Actors, pack, unpack
from lightning_rl.nested import leaves
from tests import nested_probes  # noqa: F401 - registers
from tests.helpers import make_data, make_trainer, merged


def collected(env_id="CartPole-v1", **options):
    data = make_data(env_id, rollout_length=24, num_envs=3, **options.pop("data", {}))
    torch.manual_seed(0)
    model = IMPALA(data.observation_space, data.action_space, **merged({"policy": {"hidden_sizes": (8,)}}, options))
    trainer = make_trainer()
    data.trainer = model.trainer = trainer
    trainer.strategy.connect(model)
    try:
        return data.collect()
    finally:
        data.teardown("fit")


CASES = {
    "plain": ("CartPole-v1", {}),
    "memory": (
        "CartPole-v1",
        {"policy": {"memory": {"kind": "lstm", "hidden_size": 4, "sequence_length": 8, "burn_in": 3}}},
    ),
    "nested": ("Probe/Sensors-v0", {}),
    "infos": ("Probe/Counter-v0", {"data": {"info_keys": ["level"]}}),
    "repeats": ("CartPole-v1", {"data": {"env": {"learned_action_repeat": 3}}}),
    "restarts": ("CartPole-v1", {"data": {"env": {"on_failure": "restart"}}}),
}


@pytest.mark.parametrize("in_pipe", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_unpacked_rollout_equals_the_packed_one(case, in_pipe, monkeypatch):
    if not in_pipe:
        monkeypatch.setattr(actors, "_MAX_IN_PIPE", -1)
    env_id, options = CASES[case]
    rollout = collected(env_id, **options)
    rollout.policy_version = 3
    packed = pack(rollout, actor=2)
    assert all(isinstance(x, np.ndarray if in_pipe else torch.Tensor) for x in leaves(packed.tensors()))
    if in_pipe:
        packed = pickle.loads(pickle.dumps(packed))
    arrived = unpack(packed, 0)
    one, other = rollout.tensors(), arrived.tensors()
    assert one.keys() == other.keys()
    for x, y in zip(leaves(one), leaves(other), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)
        assert not y.is_inference() and (not len(x) or x.data_ptr() != y.data_ptr())
    own = {k: v for k, v in vars(rollout).items() if k not in one}
    for name in own:
        if name != "actor":
            assert getattr(rollout, name) == getattr(arrived, name), name
    assert arrived.actor == 2


def test_a_large_rollout_goes_through_shared_memory():
    rollout = collected()
    rollout.observations = torch.zeros(25, 3, 2**12)
    packed = pack(rollout, actor=0)
    assert packed.observations.is_shared() and isinstance(packed.rewards, np.ndarray)
    rollout.observations += 1
    assert not unpack(packed, 0).observations.any()  # it was a copy


def test_actor_losses_before_dropped_rollouts_are_counted():
    rollouts = [collected(), None, collected()]
    for version, rollout in ((0, rollouts[0]), (1, rollouts[2])):
        rollout.policy_version, rollout.actors_lost = version, 1
    waited, found = [], iter(rollouts)

    class Source(Actors):
        def receive(self):
            return next(found)

        def send_policy(self, policy, version):
            raise NotImplementedError

        def close(self):
            raise NotImplementedError

    source = Source(ActorConfig(max_policy_lag=0), SimpleNamespace(settings=({}, {})), 1)
    taken = source.next_rollout(lambda: waited.append(1))
    assert taken is rollouts[2] and taken.dropped == 1 and taken.actors_lost == 2 and len(waited) == 1
