"""The pool of worker processes behaves like Gymnasium's vector environments."""

import functools
import gc
import multiprocessing
import os
import re
import signal
import tempfile
import time
from multiprocessing.reduction import ForkingPickler
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lightning_rl import IMPALA
from lightning_rl.data import actors, process_actors
from lightning_rl.environments import workers
from lightning_rl.environments.contract import batch_infos
from lightning_rl.environments.workers import WorkerPool
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import ConfigurationError
from tests.helpers import make_data, make_trainer
from tests.probes import make_batch
from tests.programs import run


class Talkative(gymnasium.Env[np.ndarray, int]):
    """Returns every kind of value in `info`, some only in some steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)
    render_mode = "rgb_array"

    def __init__(self, place: int) -> None:
        self.place = place

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.count = 0
        return self.observe(), {"begun": True, "options": options, "seed": seed}

    def step(self, action: int):
        self.count += 1
        info: dict[str, Any] = {
            "whole": self.count,
            "part": 0.5 * self.place,
            "numpy": np.float32(self.place),
            "flag": self.place == 1,
            "row": np.full(3, self.place, np.int16),
            "text": "x" * self.place,
            "none": None,
            "list": [self.place],
        }
        if self.place != self.count % 3:
            info["nested"] = {"deep": {"count": self.count}, "text": "y"}
            info[f"of_{self.place}"] = np.ones((2, 2))
        return self.observe(), 1.0, self.count == 3 + self.place, False, info

    def observe(self) -> np.ndarray:
        return np.array([self.place, self.count], np.float32)

    def render(self) -> np.ndarray:
        return np.full((2, 2, 3), self.place, np.uint8)

    def scaled(self, factor: int, plus: int = 0) -> int:
        return factor * self.place + plus


@pytest.fixture
def pair(request):
    """Return Gymnasium's `SyncVectorEnv`, and the pool."""

    factories = [functools.partial(Talkative, place) for place in range(3)]
    both = SyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP), WorkerPool(factories, 20.0)
    for env in both:
        request.addfinalizer(env.close)
    return both


def described(x: Any) -> Any:
    """Return values with their types, for exact comparison."""
    if isinstance(x, dict):
        return {key: described(value) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(map(described, x))
    x = np.asarray(x)
    return str(x.dtype), x.shape, [described(one) if isinstance(one, dict) else str(one) for one in x.flatten()]


def test_pool_equals_sync_vector_env_of_gymnasium(pair):
    local, pool = pair
    assert pool.metadata == local.metadata and pool.render_mode == "rgb_array"
    assert (pool.observation_space, pool.action_space) == (local.observation_space, local.action_space)
    for seed in (None, 7, [3, 4, 5]):
        assert described(pool.reset(seed=seed, options={"a": 1})) == described(local.reset(seed=seed, options={"a": 1}))
    for _ in range(12):
        one, other = (env.step(np.zeros(3, np.int64)) for env in (local, pool))
        assert described(other) == described(one)


def test_pool_calls_methods_and_sets_attributes(pair):
    local, pool = pair
    assert pool.call("scaled", 2, plus=1) == local.call("scaled", 2, plus=1) == (1, 3, 5)
    assert pool.call_each("scaled", [(1,), (10, 5), (100,)]) == (0, 15, 200)
    assert pool.get_attr("place") == (0, 1, 2)
    pool.set_attr("place", [5, 6, 7])
    assert pool.get_attr("place") == (5, 6, 7)
    pool.set_attr("place", 9)
    assert [picture.max() for picture in pool.render()] == [9, 9, 9]
    with pytest.raises(ValueError, match="zip"):
        pool.set_attr("place", [1, 2])


class Thinking(Talkative):
    """Acts with large matrices, as an opponent with a network would."""

    def step(self, action: int):
        torch.ones(1000, 1000).mm(torch.ones(1000, 1000)).exp()
        return self.observe(), 0.0, False, False, {"threads": torch.get_num_threads()}


def test_environments_of_workers_compute_in_one_thread():
    """More threads hang in processes that are forked from a process with threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1000, 1000).mm(torch.ones(1000, 1000)).exp()
    env = WorkerPool([functools.partial(Thinking, 0)], 20.0)
    env.reset()
    assert env.step(np.zeros(1, np.int64))[-1]["threads"].tolist() == [1]
    env.close()
    torch.set_num_threads(before)


def test_closed_pool_raises(pair):
    _, pool = pair
    pool.close()
    with pytest.raises(gymnasium.error.ClosedEnvironmentError, match=r"WorkerPool\(num_envs=3\) is closed"):
        pool.reset()


def test_replacement_uses_the_shared_memory_of_the_lost_worker():
    environments = make_batch("tests.nested_probes:Probe/Sensors-v0", 2, backend="async", env={"on_failure": "restart"})
    first = map_leaves(np.copy, environments.reset())
    environments.step(np.zeros(2, np.int64))
    pool = environments.env
    memory = leaves(pool.observations)
    os.kill(pool.processes[1].pid, signal.SIGKILL)
    step = environments.step(np.zeros(2, np.int64))
    assert list(step.failed) == [1]
    assert all(one is other for one, other in zip(leaves(step.observations), memory, strict=True))
    np.testing.assert_array_equal(step.observations["place"][1], first["place"][1])
    # The worker dies during the replay.
    state = environments.state_dict()
    os.kill(pool.processes[0].pid, signal.SIGKILL)
    exact, observations = environments.load_state_dict(state)
    assert not exact[0]
    np.testing.assert_array_equal(observations["place"][0], first["place"][0])
    environments.close()


class Slow(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.1)
        return self.env.step(action)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_replay_of_an_episode_may_take_longer_than_the_time_limit_of_a_step(on_failure):
    """Otherwise a run with slow environments could not resume from the middle of a long episode."""
    env = {"wrappers": [f"{__name__}.Slow"], "on_failure": on_failure}
    environments = make_batch("CartPole-v1", 2, backend="async", env=env)
    environments.reset()
    for t in range(6):
        environments.step(np.full(2, t % 2))
    state = environments.state_dict()
    environments.env.timeout = 0.4
    exact, _ = environments.load_state_dict(state)
    environments.close()
    assert exact.tolist() == [True, True]


class StoppedPipe:
    """Returns late from the first `poll`, as if Ctrl-Z had stopped the processes of the run for a while."""

    def __init__(self, pipe):
        self._pipe = pipe
        self._waits = [lambda seconds: time.sleep(seconds + 1.5), pipe.poll]

    def poll(self, seconds):
        return self._waits.pop(0)(seconds)

    def __getattr__(self, name):
        return getattr(self._pipe, name)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_time_limit_of_a_step_excludes_the_time_that_a_run_is_stopped(on_failure):
    environments = make_batch("CartPole-v1", backend="async", env={"on_failure": on_failure})
    environments.reset()
    environments.env.timeout = 0.5
    environments.env.pipes[0] = StoppedPipe(environments.env.pipes[0])
    step = environments.step(np.zeros(1, np.int64))
    environments.close()
    assert step.valid is None


def test_time_limit_of_a_step_excludes_the_start_of_processes_that_are_not_forked(monkeypatch):
    class Spawn(type(multiprocessing.get_context("fork"))):  # type: ignore[misc]
        def get_start_method(self, allow_none=False):
            return "spawn"

    def start_slowly(*args, work=workers._work):  # as if it imported PyTorch
        time.sleep(1.5)
        work(*args)

    monkeypatch.setattr(workers, "start_context", Spawn)
    monkeypatch.setattr(workers, "_work", start_slowly)
    environments = make_batch("CartPole-v1", backend="async", env={"on_failure": "restart", "step_timeout": 1.0})
    environments.reset()
    os.kill(environments.env.processes[0].pid, signal.SIGKILL)
    failed = [list(environments.step(np.zeros(1, np.int64)).failed) for _ in range(2)]
    environments.close()
    assert failed == [[0], []]


def test_first_signals_wait_in_new_processes_where_python_has_a_fork_server(tmp_path):
    (tmp_path / "script.py").write_text(
        "import multiprocessing, signal\n"
        "def report(pipe):\n"
        "    pipe.send(signal.pthread_sigmask(signal.SIG_BLOCK, []) >= {signal.SIGINT, signal.SIGTERM})\n"
        "if __name__ == '__main__':\n"
        "    from lightning_rl.environments.workers import signals_waiting, start_context\n"
        "    multiprocessing.set_start_method('forkserver')\n"
        "    context = start_context()\n"
        "    ours, theirs = context.Pipe()\n"
        "    process = context.Process(target=report, args=[theirs])\n"
        "    with signals_waiting():\n"
        "        process.start()\n"
        "    print(context.get_start_method(), ours.recv(), signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    )
    done = run("-m", "script", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("spawn True set()\n", "")


def test_infos_of_no_environment_are_empty():
    assert batch_infos([{}, {}]) == {}


class OddInfo(gymnasium.Wrapper):
    """Adds an info whose type and shape change at each step."""

    KINDS = (1.0, "text", None, np.zeros(3), np.zeros(2), [1, 2])

    def reset(self, **options):
        return self.env.reset(**options)[0], {"odd": self.KINDS[self.np_random.integers(6)]}

    def step(self, action):
        return *self.env.step(action)[:4], {"odd": self.KINDS[self.np_random.integers(6)]}


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_infos_of_different_types_and_shapes_are_objects(backend):
    wrappers = [f"{__name__}.OddInfo"]
    environments = make_batch("CartPole-v1", 4, backend=backend, env={"wrappers": wrappers})
    environments.reset()
    for _ in range(60):
        assert len(environments.step(np.zeros(4, np.int64)).infos["odd"]) == 4
    environments.close()


def full(*args):
    raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


def test_full_shared_memory_is_a_message_and_leaves_no_worker(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(ConfigurationError, match=r"^8 bytes of shared memory .* /dev/shm is full: .* --shm-size=1g"):
        WorkerPool([functools.partial(Talkative, 0)], 20.0)
    assert not multiprocessing.active_children()


def test_full_shared_memory_in_an_actor_is_a_message(monkeypatch):
    monkeypatch.setattr(actors, "_MAX_IN_PIPE", 1000)
    read = process_actors.SharedWeights.read

    def read_and_fill(weights, policy):
        monkeypatch.setattr(torch.Tensor, "share_memory_", full)
        return read(weights, policy)

    monkeypatch.setattr(process_actors.SharedWeights, "read", read_and_fill)
    data = make_data(num_envs=2, rollout_length=100, actors={"count": 1, "start_method": "fork"})
    with pytest.raises(ConfigurationError, match=r"^actor 0: .* bytes of shared memory .* /dev/shm is full"):
        make_trainer().fit(IMPALA(data.observation_space, data.action_space), data)


@pytest.mark.parametrize(
    "options",
    [{"backend": "async"}, {"actors": {"count": 1, "timeout": 10, "start_method": "fork"}}],
    ids=["workers", "actors"],
)
def test_temporary_folder_that_is_too_long_for_a_socket_is_a_message(monkeypatch, options):
    dumps = ForkingPickler.dumps

    def fail_to_share(message):  # as multiprocessing does for tensors in shared memory
        if isinstance(message, torch.Tensor | Rollout):
            raise OSError("AF_UNIX path too long")
        return dumps(message)

    monkeypatch.setattr(ForkingPickler, "dumps", fail_to_share)
    data = make_data(num_envs=2, rollout_length=20, **options)
    folder = re.escape(repr(tempfile.gettempdir()))
    with pytest.raises(ConfigurationError, match=rf"shared memory .* \(AF_UNIX path too long\): .* TMPDIR={folder}"):
        make_trainer().fit(IMPALA(data.observation_space, data.action_space), data)


class OfOneProcess:
    """An unused object, in a cycle, that ends another process than its own if it is finalized there."""

    def __init__(self) -> None:
        self.itself, self.process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os.kill(os.getpid(), signal.SIGSEGV)


class Collecting(Talkative):
    def __init__(self, place: int) -> None:
        super().__init__(place)
        gc.collect()


@pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="only forked processes have them")
def test_workers_finalize_no_unused_objects_of_their_parent():
    """Such an object may refer to threads, which a forked process does not have."""
    gc.disable()
    try:
        OfOneProcess()
        pool = WorkerPool([functools.partial(Collecting, place) for place in range(2)], 60)
    finally:
        gc.enable()
    pool.reset()
    pool.close()
