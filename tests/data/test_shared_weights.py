"""Publishing of weights: a reader gets all weights of one version."""

import multiprocessing
import threading

import pytest
import torch

from lightning_rl.data import process_actors
from lightning_rl.data.process_actors import SharedWeights
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.policies.actor_critic import ActorCritic
from tests.helpers import DISCRETE, VECTOR

FORK = multiprocessing.get_context("fork")


def make_policy(**options):
    torch.manual_seed(0)
    given = {"hidden_sizes": (512, 512), "normalize_observations": True, "value_normalization": "popart"}
    return ActorCritic(VECTOR, DISCRETE, **given | options)


def tensors(policy):
    return [*policy.parameters(), *policy.buffers()]


@torch.no_grad()
def fill(policy, value):
    for x in tensors(policy):
        x.fill_(value)


def hammer(weights, last):
    torch.set_num_threads(1)
    policy = make_policy()
    for version in range(last + 1):
        fill(policy, version)
        weights.publish(policy, version)


def torn_reads(weights, last=300):
    """Return the number of reads with mixed versions while another process publishes as fast as it can."""
    writer = FORK.Process(target=hammer, args=(weights, last), daemon=True)
    policy = make_policy()
    version, torn, seen = -1, 0, set()
    writer.start()
    try:
        while version < last:
            version = weights.read(policy)
            if version >= 0:
                seen.add(version)
                torn += not all(bool((x == version).all()) for x in tensors(policy))
    finally:
        writer.kill()
        writer.join()
    assert len(seen) > 3  # reads and writes overlapped
    return torn


def test_weights_are_never_read_half_written():
    assert torn_reads(SharedWeights(make_policy(), FORK)) == 0


def test_a_reader_waits_until_all_weights_are_written(monkeypatch):
    weights, policy = SharedWeights(make_policy(), FORK), make_policy()
    source = make_policy()
    fill(source, 1)
    reached, resume, write = threading.Event(), threading.Event(), process_actors.copy_weights

    def write_in_two_parts(targets, sources):
        half = len(sources) // 2
        write(targets[:half], sources[:half])
        reached.set()
        assert resume.wait(10)
        write(targets[half:], sources[half:])

    monkeypatch.setattr(process_actors, "copy_weights", write_in_two_parts)
    writer = threading.Thread(target=weights.publish, args=(source, 1))
    writer.start()
    assert reached.wait(10)
    reading = threading.Thread(target=weights.read, args=(policy,))
    reading.start()
    reading.join(0.1)
    assert reading.is_alive()
    resume.set()
    writer.join()
    reading.join(10)
    assert all(bool((x == 1).all()) for x in tensors(policy))


def test_weights_of_every_dtype_arrive():
    source, target = make_policy().double(), make_policy().double()
    fill(target, 0)
    weights = SharedWeights(source, FORK)
    weights.publish(source, 7)
    assert weights.read(target) == 7
    for one, other in zip(tensors(source), tensors(target), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    observations = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(source.value(observations), target.value(observations))


def test_publishing_ends_with_an_error_of_the_actor_that_holds_the_lock():
    weights = SharedWeights(make_policy(), FORK)
    weights._lock.acquire()

    def check_actors():
        raise EnvironmentFailure("actor 1 is gone")

    with pytest.raises(EnvironmentFailure, match="actor 1 is gone"):
        weights.publish(make_policy(), 1, check_actors)
    weights._lock.release()
    weights.publish(make_policy(), 2)
    assert int(weights._version) == 2
