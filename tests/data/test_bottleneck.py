"""When a user is told that environments are what a run waits for, and what to try."""

import pytest

from lightning_rl.data import bottleneck
from lightning_rl.data.bottleneck import BottleneckWatch
from lightning_rl.environments import EnvironmentSpec


def hints(env_seconds, between=10.0, count=20, backend="sync", num_envs=8):
    watch = BottleneckWatch(EnvironmentSpec("CartPole-v1", backend=backend), num_envs)
    return [watch.check(env_seconds, between * k) for k in range(count)]


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(bottleneck.os, "cpu_count", lambda: 4)


def test_the_hint_comes_once_after_a_minute_with_the_share_and_the_backends_there_are():
    found = hints(7.0)
    assert [k for k, hint in enumerate(found) if hint is not None] == [6]
    assert found[6].startswith(
        "environments take 70% of the time (time/env_seconds), with backend='sync' and num_envs=8"
    )
    assert "backend='native', which this environment has" in found[6]
    assert "backend='async', a process for each environment, on 4 cores" in found[6]


def test_nothing_is_said_where_learning_takes_as_long_nor_later():
    assert hints(5.0) == [None] * 20
    watch = BottleneckWatch(EnvironmentSpec("CartPole-v1"), 8)
    early = [watch.check(1.0, 10.0 * k) for k in range(8)]
    assert early + [watch.check(9.0, 80.0 + 10 * k) for k in range(20)] == [None] * 28, "it is judged once"


def test_the_first_rollout_does_not_count():
    watch = BottleneckWatch(EnvironmentSpec("CartPole-v1"), 8)
    watch.check(1000.0, 0.0)
    assert [watch.check(1.0, 10.0 * k) for k in range(1, 20)] == [None] * 19


def test_what_is_proposed_depends_on_the_backend():
    asynchronous = next(filter(None, hints(9.0, backend="async", num_envs=16)))
    assert (
        "fewer environments: their processes share 4 cores" in asynchronous and "backend='async'," not in asynchronous
    )
    native = next(filter(None, hints(9.0, backend="native")))
    assert "a larger num_envs" in native and "backend='native'," not in native
