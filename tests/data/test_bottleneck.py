"""The hint for runs that wait for their environments."""

import logging
from types import SimpleNamespace

import pytest

from lightning_rl import RolloutDataModule


@pytest.fixture
def hints(monkeypatch, caplog):
    """A function that returns the hint after each rollout, None where there was none."""

    def run(env_seconds, between=10.0, backend="sync", num_envs=8):
        data, found = RolloutDataModule("CartPole-v1", num_envs, backend=backend), []
        data.train_dataloader()
        for index, seconds in enumerate(env_seconds):
            rollout = SimpleNamespace(parts_of_seconds={"env": seconds}, actor=None, failures=None)
            monkeypatch.setattr(data, "_collect", lambda rollout=rollout: rollout)
            with monkeypatch.context() as clock, caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
                clock.setattr("time.perf_counter", lambda index=index: between * index)
                caplog.clear()
                data.collect()
            found.append(caplog.messages[0] if caplog.messages else None)
        return found

    return run


def test_hint_comes_once_after_a_minute_and_names_other_backends(hints):
    found = hints([7.0] * 20)
    assert [k for k, hint in enumerate(found) if hint is not None] == [6]
    assert found[6].startswith(
        "environments take 70% of the time (time/env_seconds), with backend='sync' and num_envs=8"
    )
    assert "backend='native' or 'envpool', if they have this environment" in found[6]
    assert "backend='async', a process for each environment" in found[6]


def test_no_hint_if_learning_takes_as_long_in_the_first_minute(hints):
    assert hints([5.0] * 20) == [None] * 20
    assert hints([1.0] * 8 + [9.0] * 20) == [None] * 28


def test_the_first_rollout_does_not_count(hints):
    assert hints([1000.0] + [1.0] * 19) == [None] * 20


def test_ideas_depend_on_the_backend(hints):
    asynchronous = next(filter(None, hints([9.0] * 20, backend="async", num_envs=16)))
    assert "a num_envs of about the number of cores" in asynchronous and "backend='async'," not in asynchronous
    native = next(filter(None, hints([9.0] * 20, backend="native")))
    assert "a larger num_envs" in native and "backend='native'," not in native
