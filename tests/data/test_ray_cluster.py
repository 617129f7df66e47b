"""Actors in a Ray cluster with two simulated machines; run with -m slow."""

import os
import re
import signal
import time

import pytest
import torch
from lightning.pytorch import Callback

from tests.data.test_process_actors import Versions, make
from tests.data.test_ray_actors import breaks, make_actors
from tests.helpers import MemoryLogger, make_trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


class Fates(Callback):
    """Adds a machine, kills an actor, and removes the machine, each after recovery from the one before."""

    def __init__(self, cluster, data):
        self.cluster, self.data, self.stage, self.came = cluster, data, 0, set()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        version, members = pl_module.policy_version, self.data._source._members
        here = [member.where is not None for member in members]
        # Actors with a rollout since the last change was noticed.
        self.came = set() if self.stage == 2 and members[0].life == 0 else self.came | {batch.actor}
        if self.stage == 0 and version == 3:
            assert sum(here) == 1
            self.node = self.cluster.add_node(num_cpus=1)
            self.stage = 1
        elif self.stage == 1 and self.came == {0, 1}:
            os.kill(int(re.findall(r"\d+", members[0].where)[0]), signal.SIGKILL)
            self.stage, self.came = 2, set()
        elif self.stage == 2 and members[0].life == 1 and all(here) and self.came == {0, 1}:
            self.cluster.remove_node(self.node, allow_graceful=False)
            self.stage, self.last = 3, version
        elif self.stage == 3 and sum(member.life for member in members) == 2 and version > self.last + 40:
            trainer.should_stop = True
            self.stage, self.here_at_last = 4, sum(here)
        time.sleep(0.02)


@pytest.fixture
def cluster():
    ray = pytest.importorskip("ray")
    utilities = pytest.importorskip("ray.cluster_utils")
    cluster = utilities.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.timeout(600)
def test_actors_join_die_and_are_replaced_while_training_goes_on(cluster):
    data = make_actors(actors={"ray_address": cluster.address}, rollouts_per_epoch=50)
    model, seen, logger, fates = make(data), Versions(), MemoryLogger(), Fates(cluster, data)
    handler = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(callbacks=[seen, fates], logger=logger, log_every_n_steps=1, max_epochs=60)
    with pytest.warns(UserWarning) as warned:
        trainer.fit(model, data)
    said = [str(w.message) for w in warned]
    assert sum("has room for 1 of them" in text for text in said) == 1 and sum("is gone" in text for text in said) == 1
    assert fates.stage == 4 and fates.here_at_last == 1
    # Each received rollout was learned from once.
    assert model.policy_version == len(seen.rollouts) and model.env_steps == 32 * len(seen.rollouts)
    assert len({tuple(rollout.observations.flatten().tolist()) for rollout in seen.rollouts}) == len(seen.rollouts)
    assert sum(value for _, value in logger.rows("rollout/actors_lost")) == 2
    of_actor = [[rollout for rollout in seen.rollouts if rollout.actor == actor] for actor in range(2)]
    assert all(own for own in of_actor)
    # Rollouts of an actor are contiguous unless it was lost in between.
    assert 1 <= sum(map(breaks, of_actor)) <= 2
    for rollout in seen.rollouts[:: len(seen.rollouts) // 20]:
        model.policy.load_state_dict(seen.policies[rollout.policy_version])
        again = model.policy.log_prob(rollout.observations[:-1], rollout.actions)
        assert (again - rollout.log_probs).abs().max() <= 1e-6
    assert signal.getsignal(signal.SIGTERM) is handler
    assert all(torch.isfinite(x).all() for x in model.parameters())
