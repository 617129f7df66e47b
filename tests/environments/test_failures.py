"""Failures of environments raise one error with index, episode, seed and step; no process hangs or is left behind."""

import functools
import multiprocessing
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode

from lightning_rl import PPO, RolloutDataModule
from lightning_rl.data.collector import restore
from lightning_rl.environments import EnvConfig, EnvironmentFailure, EnvironmentSpec, make_environments
from lightning_rl.environments.batch import LocalVectorEnv
from lightning_rl.environments.contract import EVALUATION, EpisodeTracker, derive_seed
from lightning_rl.environments.workers import send
from lightning_rl.validation import ConfigurationError
from tests import torch_environments
from tests.helpers import assert_equal_parameters, make_trainer, parameters_of
from tests.probes import Counter, Told, make_batch, make_collector, seeds_of, step_timeout
from tests.programs import Program


class DiesInWorkers(gymnasium.Wrapper):
    """Crashes in the constructor, in worker processes only."""

    def __init__(self, env, parent):
        super().__init__(env)
        if os.getpid() != parent:
            os._exit(7)


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

FORK = multiprocessing.get_start_method() == "fork"
FORKED = "; if only forked processes fail, call multiprocessing.set_start_method('spawn')" if FORK else ""
INDEX, EPISODE = 2, 1
SEED = derive_seed(seeds_of(4)[INDEX], EPISODE)
"""The environments below fail in this episode, after an episode of 5 steps."""


def failing(how, at=3, backend="sync", timeout=None, **options):
    env = {"step_timeout": timeout or step_timeout(how, backend)}
    options |= {"how": how, "at": at, "episode_seed": SEED, "lengths": (5,)}
    return make_batch("Probe/Failing-v0", 4, backend=backend, env=env, **options)


def run_until_failure(environments, steps=20):
    """Step until an environment fails; return the error, the number of the step, and the seconds."""
    start = time.perf_counter()
    try:
        environments.reset()
        for step in range(1, steps):
            try:
                environments.step(np.zeros(4, np.int64))
            except EnvironmentFailure as error:
                return error, step, time.perf_counter() - start
    finally:
        environments.close()
    raise AssertionError("nothing failed")


def is_running(pid):
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, seconds=5.0):
    """Wait until the processes have ended."""
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_environment_that_raises_in_step_is_named_with_episode_seed_and_step(backend):
    error, step, _ = run_until_failure(failing("raise", backend=backend))
    assert step == 5 + 3
    assert str(error) == (
        f"environment 2 (episode 1, seed {SEED}, step 3) raised in step: ArithmeticError: the physics exploded"
    )


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_environment_that_raises_in_reset_is_named(backend):
    error, step, _ = run_until_failure(failing("raise", at=0, backend=backend))
    assert step == 5
    assert str(error).startswith(f"environment 2 (episode 1, seed {SEED}, step 0) raised in reset: ArithmeticError")


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(("how", "what"), [("SystemExit", "SystemExit: 0"), ("KeyboardInterrupt", "KeyboardInterrupt")])
@pytest.mark.parametrize("at", [3, 0])
def test_system_exit_of_an_environment_is_a_failure(at, how, what, backend):
    error, *_ = run_until_failure(failing(how, at, backend=backend))
    where = "step" if at else "reset"
    assert str(error) == f"environment 2 (episode 1, seed {SEED}, step {at}) raised in {where}: {what}"


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("env_id", "backend", "cls"),
    [("CartPole-v1", "native", CartPoleVectorEnv), (torch_environments.ID, "torch", torch_environments.Reach)],
)
def test_system_exit_of_a_vectorized_environment_is_a_failure(env_id, backend, cls, error, monkeypatch):
    def step(*_):
        raise error

    monkeypatch.setattr(cls, "step", step)
    environments = make_batch(env_id, 2, backend=backend)
    environments.reset()
    seeds = ", ".join(map(str, seeds_of(2))) if backend == "native" else seeds_of(2)[0]
    with pytest.raises(
        EnvironmentFailure,
        match=rf"^the environments raised in step: {type(error).__name__}.* \(step 1, seeds? {seeds}\)$",
    ):
        environments.step(torch.zeros(2, 1) if backend == "torch" else np.zeros(2, np.int64))
    environments.close()


class SendsSignal(gymnasium.Wrapper):
    """Sends a signal to its own process in every step."""

    def __init__(self, env, signum):
        super().__init__(env)
        self.signum = signum

    def step(self, action):
        signal.raise_signal(self.signum)
        return self.env.step(action)


class Leave:
    """A custom signal handler."""

    def __call__(self, signum, frame):
        sys.exit(5)

    def method(self, signum, frame):
        sys.exit(5)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize(
    ("signum", "handler", "error"),
    [
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGTERM, lambda *_: sys.exit(5), SystemExit),
        (signal.SIGTERM, Leave(), SystemExit),
        (signal.SIGTERM, functools.partial(Leave().method), SystemExit),
    ],
)
def test_signal_during_a_step_is_no_failure_of_the_environment(signum, handler, error, on_failure):
    wrapper = {"class_path": f"{__name__}.SendsSignal", "init_args": {"signum": int(signum)}}
    environments = make_batch("Probe/Counter-v0", env={"wrappers": [wrapper], "on_failure": on_failure})
    environments.reset()
    before = signal.signal(signum, handler)
    try:
        with pytest.raises(error):
            environments.step(np.zeros(1, np.int64))
    finally:
        signal.signal(signum, before)
        environments.close()


class EndsProgram(gymnasium.Wrapper):
    """Ends the program in the constructor."""

    def __init__(self, env):
        sys.exit(0)


def test_system_exit_while_an_environment_is_made_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a_script.py").write_text("import sys; sys.exit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))
    wrapper = {"class_path": f"{__name__}.EndsProgram", "init_args": {}}
    message = r"^env.wrappers: .*EndsProgram refused the arguments {}: SystemExit: 0$"
    with pytest.raises(ConfigurationError, match=message):
        make_batch("Probe/Counter-v0", env={"wrappers": [wrapper]})
    message = r"^env.imports: module 'a_script' cannot be imported \(SystemExit: 0\)"
    with pytest.raises(ConfigurationError, match=message):
        make_batch("Probe/Counter-v0", env={"imports": ("a_script",)})
    gymnasium.register("Probe/Ends-v0", lambda: sys.exit(0))
    with pytest.raises(ConfigurationError, match=r"^env_id='Probe/Ends-v0' cannot .*: SystemExit: 0 \(at .*\)$"):
        make_batch("Probe/Ends-v0")
    del gymnasium.registry["Probe/Ends-v0"]


class FailsToClose(gymnasium.Wrapper):
    """Fails in its first reset or in `close`.

    Args:
        how: `raise`, `SystemExit`, `hang` or `die`.
        where: `reset` or `close`.
    """

    def __init__(self, env, how, where="close"):
        super().__init__(env)
        self.how, self.where = how, where

    def reset(self, **kwargs):
        if self.where == "reset":
            self.fail()
        observation, info = self.env.reset(**kwargs)
        return observation, info | {"mask": np.ones(3, np.int8)}

    def close(self):
        if self.where == "close":
            self.fail()

    def fail(self):
        if self.how == "raise":
            raise OSError("the port is taken")
        if self.how == "SystemExit":
            sys.exit(0)
        if self.how == "hang":
            time.sleep(1000)
        os._exit(9)


@linux
@pytest.mark.parametrize(
    ("backend", "how", "where", "message"),
    [
        ("sync", "raise", "close", "the environments raised in close: OSError: the port is taken (step 0, seeds 0)"),
        ("sync", "SystemExit", "close", "the environments raised in close: SystemExit: 0 (step 0, seeds 0)"),
        (
            "async",
            "raise",
            "reset",
            "an environment raised in the reset that shows its action masks: OSError: the port is taken",
        ),
        (
            "async",
            "hang",
            "reset",
            "environment 0 gave no answer within env.step_timeout=0.5 seconds, before its first step" + FORKED,
        ),
        (
            "async",
            "die",
            "reset",
            "environment 0 is gone: its worker process died with exit code 9, before its first step" + FORKED,
        ),
    ],
)
def test_environment_that_cannot_show_its_spaces_is_named(backend, how, where, message):
    wrapper = {"class_path": f"{__name__}.FailsToClose", "init_args": {"how": how, "where": where}}
    timeout, mask = 0.5 if backend == "async" else None, "info.mask" if where == "reset" else None
    env = {"wrappers": [wrapper], "step_timeout": timeout, "action_mask": mask}
    data = RolloutDataModule("Probe/Counter-v0", backend=backend, env=env)
    start = time.perf_counter()
    with pytest.raises(EnvironmentFailure) as caught:
        _ = data.observation_space
    assert str(caught.value) == message and time.perf_counter() - start < 5
    assert not children_of(os.getpid())


@linux
@pytest.mark.parametrize("how", ["raise", "hang", "die"])
def test_worker_that_fails_to_close_does_not_outlive_the_reading_of_the_spaces(how, monkeypatch):
    monkeypatch.setattr("lightning_rl.environments.workers._GRACE", 0.3)
    wrapper = {"class_path": f"{__name__}.FailsToClose", "init_args": {"how": how}}
    data = RolloutDataModule("Probe/Counter-v0", backend="async", env={"wrappers": [wrapper]})
    assert data.action_space.n == 3
    assert not children_of(os.getpid())


def test_spaces_changed_by_vector_wrappers_are_read_with_a_time_limit():
    env = {"wrappers": ["tests.probes.DoubleVectorReward"], "step_timeout": 20.0}
    data = RolloutDataModule("Probe/Counter-v0", backend="async", env=env)
    assert data.action_space.n == 3


def fails_to_close(spec, how):
    """Return a spec whose environments fail in `close`."""
    wrapper = {"class_path": f"{__name__}.FailsToClose", "init_args": {"how": how}}
    return replace(spec, env=replace(spec.env, wrappers=[wrapper]))


def test_failure_to_close_after_training_is_an_error():
    data = RolloutDataModule("Probe/Counter-v0", 2, 6, 1, seed=0)
    model = PPO(data.observation_space, data.action_space, num_minibatches=1)
    data._sampler.spec = fails_to_close(data.spec, "SystemExit")
    with pytest.raises(EnvironmentFailure, match=r"^the environments raised in close: SystemExit: 0 \(step 6, seeds "):
        make_trainer().fit(model, data)


@pytest.mark.parametrize("where", ["close", "__init__"])
def test_environment_that_fails_does_not_keep_others_of_this_process_open(where):
    closed = []

    class Numbered(Counter):
        def __init__(self, number):
            super().__init__()
            self.number = number
            if where == "__init__" and number == 2:
                raise OSError("the port is taken")

        def close(self):
            closed.append(self.number)
            if where == "close" and self.number != 1:
                raise OSError("the port is taken")

    with pytest.raises(OSError, match="the port is taken"):
        LocalVectorEnv([functools.partial(Numbered, number) for number in range(3)]).close()
    assert {*closed} == ({0, 1, 2} if where == "close" else {0, 1})


class Refuses(gymnasium.Wrapper):
    def __init__(self, env):
        raise ValueError("no such level")


class RefusesAll(gymnasium.vector.VectorWrapper):
    def __init__(self, env):
        raise ValueError("no such level")


@pytest.mark.parametrize(
    ("env_id", "backend", "options", "message"),
    [
        ("Probe/Counter-v0", "sync", {"wrappers": [f"{__name__}.Refuses"]}, "no such level"),
        ("Probe/Counter-v0", "sync", {"wrappers": [f"{__name__}.RefusesAll"]}, "no such level"),
        ("Probe/Counter-v0", "sync", {"action_mask": "info.valid"}, "KeyError: 'valid'"),
        ("CartPole-v1", "native", {"action_mask": "info.valid"}, "KeyError: 'valid'"),
        ("CartPole-v1", "torch", {"frame_stack": 2}, "its default with backend='torch'"),
    ],
)
def test_environments_are_closed_if_their_options_fail(env_id, backend, options, message, monkeypatch):
    closed = []
    for cls in (Counter, CartPoleVectorEnv):
        monkeypatch.setattr(cls, "close", lambda env, **_: closed.append(env))
    with pytest.raises(ConfigurationError, match=message):
        make_environments(EnvironmentSpec(env_id, EnvConfig(**options), backend), 1, [0])
    assert len(closed) == 1


def test_environments_of_different_spaces_are_closed():
    closed = []

    class Closing(Counter):
        def close(self):
            closed.append(self)

    with pytest.raises(RuntimeError, match="environment 1 has action_space="):
        LocalVectorEnv([functools.partial(Closing, start=start) for start in (0, 1)])
    assert len(closed) == 2


class WithFile(gymnasium.Wrapper):
    """Has a file while it is open, as other environments have programs, and fails in one of several processes."""

    def __init__(self, env, folder, fails_in):
        super().__init__(env)
        self.file = Path(folder, str(os.getpid()))
        self.fails_in = fails_in
        try:
            Path(folder, "first").touch(exist_ok=False)
        except FileExistsError:
            self.fails_in = None
        self.fail("__init__")
        self.file.touch()

    def fail(self, where):
        if self.fails_in == where:
            raise OSError("the port is taken")

    def step(self, action):
        self.fail("step")
        time.sleep(0.2)
        *values, info = self.env.step(action)
        return *values, info | {"image": np.zeros((500, 500, 3), np.uint8)}  # more than a pipe holds

    def close(self):
        self.file.unlink(missing_ok=True)
        super().close()


@pytest.mark.parametrize("where", ["step", "__init__"])
def test_environment_that_fails_lets_those_in_other_processes_close(where, tmp_path):
    wrapper = {"class_path": f"{__name__}.WithFile", "init_args": {"folder": str(tmp_path), "fails_in": where}}
    with pytest.raises((EnvironmentFailure, ConfigurationError), match="the port is taken"):
        environments = make_batch("Probe/Counter-v0", 4, backend="async", env={"wrappers": [wrapper]})
        environments.reset()
        environments.step(np.zeros(4, np.int64))
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_failure_to_close_does_not_hide_the_error_that_ended_the_run():
    options = {"how": "raise", "at": 2, "episode_seed": None}
    data = RolloutDataModule("Probe/Failing-v0", 2, 6, 1, env={"kwargs": options})
    model = PPO(data.observation_space, data.action_space, num_minibatches=1)
    data._sampler.spec = fails_to_close(data.spec, "raise")
    with pytest.warns(UserWarning, match="raised in close: OSError"), pytest.raises(EnvironmentFailure, match="step 2"):
        make_trainer().fit(model, data)


def test_traceback_of_a_worker_is_kept_as_a_note():
    error, *_ = run_until_failure(failing("raise", backend="async"))
    assert "in fail" in "".join(error.__notes__) and "the physics exploded" in "".join(error.__notes__)


@pytest.mark.parametrize(("how", "code"), [("kill", -signal.SIGKILL), ("exit", 3)])
def test_dead_worker_is_named_and_all_workers_end(how, code):
    environments = failing(how, backend="async")
    workers = [process.pid for process in environments.env.processes]
    error, step, seconds = run_until_failure(environments)
    assert step == 5 + 3 and seconds < 10
    assert str(error) == (
        f"environment 2 (episode 1, seed {SEED}, step 3) is gone: its worker process died with exit code {code}"
    )
    assert gone(workers)


@pytest.mark.parametrize("at", [3, 0])
def test_hanging_worker_is_named_within_the_time_limit_and_all_workers_end(at):
    environments = failing("hang", at, backend="async")
    workers = [process.pid for process in environments.env.processes]
    error, step, seconds = run_until_failure(environments)
    assert step == 5 + at and 1 <= seconds < 10
    # A worker that hangs in a reset has not reported the end of the previous episode.
    where = f"(episode 1, seed {SEED}, step 3)" if at else f"(episode 0, seed {derive_seed(seeds_of(4)[2], 0)}, step 5)"
    assert str(error) == f"environment 2 {where} gave no answer within env.step_timeout=1 seconds"
    assert gone(workers)


@pytest.mark.parametrize("role", ["", "evaluation "])
def test_worker_that_dies_in_the_constructor_is_an_error(role):
    wrapper = {"class_path": f"{__name__}.DiesInWorkers", "init_args": {"parent": os.getpid()}}
    spec = EnvironmentSpec("Probe/Counter-v0", EnvConfig(wrappers=[wrapper]), "async", evaluation=bool(role))
    end = re.escape("exit code 7, 7, before its first step" + FORKED)
    with pytest.raises(EnvironmentFailure, match=rf"^{role}environment 0, 1 is gone: .* {end}$"):
        make_environments(spec, 2, [0, 1])


def test_worker_killed_from_outside_between_two_steps_is_named():
    environments = make_batch("Probe/Counter-v0", 3, backend="async")
    environments.reset()
    workers = [process.pid for process in environments.env.processes]
    os.kill(workers[1], signal.SIGKILL)
    assert gone(workers[1:2])
    with pytest.raises(EnvironmentFailure, match=r"^environment 1 \(episode 0, seed \d+, step 1\) is gone: .* -9$"):
        environments.step(np.zeros(3, np.int64))
    assert gone(workers)
    environments.close()


def test_close_ends_workers_even_if_one_hangs(monkeypatch):
    monkeypatch.setattr("lightning_rl.environments.workers._GRACE", 0.3)
    environments = failing("hang", backend="async", timeout=100.0)
    workers = [process.pid for process in environments.env.processes]
    environments.reset()
    for _ in range(7):
        environments.step(np.zeros(4, np.int64))
    for pipe in environments.env.pipes:
        send(pipe, ("step", 0))
    environments.close()
    environments.close()
    assert gone(workers, 0.1)


@linux
def test_workers_do_not_outlive_a_parent_that_is_killed():
    """A hanging worker does not notice that its pipe is closed."""
    script = (
        "import numpy as np\n"
        "from tests.environments.test_failures import failing\n"
        "environments = failing('hang', backend='async', timeout=1000.0)\n"
        "environments.reset()\n"
        "print(*(process.pid for process in environments.env.processes), flush=True)\n"
        "while True:\n"
        "    environments.step(np.zeros(4, np.int64))\n"
    )
    parent = Program("-c", script)
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    time.sleep(0.3)
    assert len(workers) == 4 and all(map(is_running, workers))
    os.kill(parent.pid, signal.SIGKILL)  # only the parent
    ended = gone(workers)
    for pid in filter(is_running, workers):
        os.kill(pid, signal.SIGKILL)
    assert ended


SEVERAL = "; mo_gymnasium.wrappers.LinearReward weights several objectives, ParallelEnvVector adapts several agents"


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("none reward", "reward None: expected a number"),
        ("text reward", "reward '1.0': expected a number"),
        ("few reward", "reward array([1.], dtype=float32): expected a number" + SEVERAL),
        ("many reward", "reward array([1., 1., 1.], dtype=float32): expected a number" + SEVERAL),
        ("few observation", "an observation of shape (1,): expected (2,)"),  # shared memory would broadcast it
        ("many observation", "an observation of shape (3,): expected (2,)"),
        ("none observation", "an observation of shape (): expected (2,)"),
    ],
)
def test_invalid_reward_or_shape_is_named(how, what, backend):
    error, step, _ = run_until_failure(failing(how, backend=backend))
    assert step == 5 + 3
    assert str(error) == f"environment 2 (episode 1, seed {SEED}, step 3) returned {what}"


@pytest.mark.parametrize("options", [{"action_repeat": 2}, {"learned_action_repeat": 2}])
def test_invalid_reward_of_a_repeated_action_is_named(options):
    environments = make_batch("Probe/Failing-v0", 1, env=options, how="none reward", at=1, episode_seed=None)
    environments.reset()
    repeats = {"action": np.zeros(1, np.int64), "repeat": np.full(1, 2)}
    with pytest.raises(EnvironmentFailure, match=r"^environment 0 \(.*, step 1\) returned reward None: expected a num"):
        environments.step(repeats if "learned_action_repeat" in options else np.zeros(1, np.int64))


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_wrong_shape_from_a_reset_is_named(backend):
    error, step, _ = run_until_failure(failing("few observation", at=0, backend=backend))
    assert step == 5
    assert str(error) == (
        f"environment 2 (episode 1, seed {SEED}, step 0) returned an observation of shape (1,): expected (2,)"
    )


def test_unpicklable_info_of_a_worker_is_named():
    """The worker raises outside of the environment: a generator cannot be pickled."""
    environments = make_batch("Probe/Unsendable-v0", backend="async")
    environments.reset()
    with pytest.raises(
        EnvironmentFailure,
        match=r"^environment 0 \(episode 0, seed \d+, step 1\) raised in its worker process: TypeError: cannot send "
        r"\(1.0, False, False, .* to another process \(cannot pickle 'generator' object\): expected an info of values "
        r"that can be pickled",
    ):
        environments.step(np.zeros(1, np.int64))
    environments.close()


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("sync", "raise"),
        ("sync", "none reward"),
        ("sync", "few observation"),
        ("sync", "nan observation"),
        ("async", "raise"),
        ("async", "kill"),
        ("async", "hang"),
    ],
)
def test_failure_in_evaluation_is_named(backend, how):
    seed = derive_seed(derive_seed(0, EVALUATION, 0, 1), 0)
    kwargs = {"how": how, "at": 2, "episode_seed": seed}
    env = {"kwargs": kwargs, "step_timeout": step_timeout(how, backend)}
    data = RolloutDataModule("Probe/Failing-v0", 2, 6, 10, backend=backend, env=env, evaluation={"episodes": 2}, seed=0)
    model = PPO(data.observation_space, data.action_space, num_minibatches=1)
    with pytest.raises(
        EnvironmentFailure, match=rf"^evaluation environment 1 \(episode 0, seed {seed}, step 2\) (r|is gone|gave no)"
    ):
        make_trainer(limit_val_batches=1).validate(model, data, verbose=False)


@pytest.mark.parametrize("play", ["test", "predict"])
def test_failure_in_test_or_predict_names_an_evaluation_environment(play):
    options = {"how": "raise", "at": 2, "episode_seed": None}
    data = RolloutDataModule("Probe/Failing-v0", 2, 6, 10, env={"kwargs": options}, evaluation={"episodes": 2}, seed=0)
    model = PPO(data.observation_space, data.action_space, num_minibatches=1)
    with pytest.raises(EnvironmentFailure, match=r"^evaluation environment 0 \(episode 0, seed \d+, step 2\) raised"):
        getattr(make_trainer(), play)(model, data)


@pytest.mark.parametrize(
    ("env_id", "backend", "role"),
    [
        *(("CartPole-v1", backend, role) for backend in ("sync", "async", "native") for role in ("", "evaluation ")),
        *((torch_environments.ID, "torch", role) for role in ("", "evaluation ")),
    ],
)
def test_evaluation_environments_are_named_by_every_backend(env_id, backend, role):
    environments = make_batch(env_id, 2, backend=backend, evaluation=bool(role))
    try:
        environments.reset()
        if backend != "torch":  # which does not track episodes
            assert environments.label(1).startswith(f"{role}environment 1 (episode 0, ")
        with pytest.raises(EnvironmentFailure, match=rf"^the {role}environments raised in step: "):
            environments.step(None)
    finally:
        environments.close()


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_replaced_evaluation_environment_is_named(how):
    options = {"how": how, "at": 2, "episode_seed": derive_seed(seeds_of(1)[0], 0)}
    env = {"on_failure": "restart"}
    environments = make_batch("Probe/Failing-v0", backend="async", env=env, evaluation=True, **options)
    try:
        environments.reset()
        for _ in range(2):
            environments.step(np.zeros(1, np.int64))
        (failure,) = environments.pop_failures()
    finally:
        environments.close()
    assert failure.startswith(f"evaluation environment 0 (episode 0, seed {options['episode_seed']}, step 2) ")


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("what", ["observation", "reward"])
def test_value_that_is_not_finite_is_named_with_environment_episode_seed_and_step(what, value, mode):
    error, step, _ = run_until_failure(failing(f"{value} {what}", mode=mode))
    assert step == 5 + 3 + (mode is AutoresetMode.NEXT_STEP)
    entry = " (entry 1)" if what == "observation" else ""
    assert str(error) == (
        f"environment 2 (episode 1, seed {SEED}, step 3) returned {what}{entry} {value}: expected a finite number that "
        "float32 can hold"
    )


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("at", [0, 5])
def test_first_and_final_observations_must_be_finite(at, mode):
    error, step, _ = run_until_failure(failing("nan observation", at, mode=mode))
    assert step == 5 + at + (mode is AutoresetMode.NEXT_STEP)
    assert str(error).startswith(
        f"environment 2 (episode 1, seed {SEED}, step {at}) returned observation (entry 1) nan"
    )


def test_very_first_observation_must_be_finite():
    environments = make_batch(
        "Probe/Failing-v0", how="nan observation", at=0, episode_seed=derive_seed(seeds_of(1)[0], 0)
    )
    with pytest.raises(
        EnvironmentFailure, match=r"^environment 0 \(episode 0, seed \d+, step 0\) returned observation"
    ):
        environments.reset()


@pytest.mark.parametrize("clip", ["abs_one", "soft_asymmetric", 2.0])
def test_infinite_reward_is_not_clipped(clip):
    seed = derive_seed(seeds_of(1)[0], 0)
    environments = make_batch(
        "Probe/Failing-v0", 1, env={"reward_clip": clip}, how="inf reward", at=1, episode_seed=seed
    )
    environments.reset()
    with pytest.raises(EnvironmentFailure, match=r"step 1\) returned reward inf: expected a finite number"):
        environments.step(np.zeros(1, np.int64))


def test_number_too_large_for_float32_is_an_error():
    error, *_ = run_until_failure(failing("1e39 reward"))
    assert "returned reward 1e+39" in str(error)
    largest = float(np.finfo(np.float32).max)
    environments = failing(f"{largest} reward")
    environments.reset()
    rewards = [environments.step(np.zeros(4, np.int64)).rewards[2] for _ in range(9)]
    assert rewards[7] == largest


def test_first_failure_is_named_if_later_rewards_are_invalid_too():
    environments = make_batch(
        "Probe/Failing-v0", 2, how="nan reward", at=2, episode_seed=derive_seed(seeds_of(2)[1], 0)
    )
    with pytest.raises(EnvironmentFailure, match=r"^environment 1 \(episode 0, seed \d+, step 2\) returned reward nan"):
        make_collector(environments, 10).collect(Told())


@pytest.mark.parametrize("how", ["nan observation", "inf reward", "raise"])
def test_failure_in_training_stops_before_the_optimizer_step(how):
    seed = derive_seed(derive_seed(0, 0, 0, 1, 0), 2)  # run, training, rank, environment 1, start; episode 2
    options = {"how": how, "at": 2, "episode_seed": seed}
    data = RolloutDataModule("Probe/Failing-v0", 2, 6, 10, env={"kwargs": options}, evaluation={"episodes": 1}, seed=0)
    model = PPO(data.observation_space, data.action_space, num_minibatches=1)
    steps = []
    model.on_train_batch_end = lambda *_: steps.append(parameters_of(model))
    with pytest.raises(EnvironmentFailure, match=rf"^environment 1 \(episode 2, seed {seed}, step 2\)"):
        make_trainer().fit(model, data)
    assert len(steps) == 1  # steps 1 to 6 were learned from; the failure came in step 12
    assert_equal_parameters(model, steps[0])
    assert all(torch.isfinite(p).all() for p in model.parameters())


@linux
def test_failure_in_training_leaves_no_worker_behind():
    seed = derive_seed(derive_seed(0, 0, 0, 1, 0), 0)
    options = {"how": "kill", "at": 4, "episode_seed": seed}
    data = RolloutDataModule("Probe/Failing-v0", 2, 6, 10, env={"kwargs": options}, seed=0, backend="async")
    model = PPO(data.observation_space, data.action_space, num_minibatches=1)
    with pytest.raises(EnvironmentFailure, match="is gone"):
        make_trainer().fit(model, data)
    assert not children_of(os.getpid())


def children_of(pid):
    """Return the running child processes."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    workers = [int(child) for child in children if not re.search("resource_tracker|tests.programs", command_of(child))]
    return [worker for worker in workers if not gone([worker], 2.0)]


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return ""


def test_failure_or_loss_of_many_environments_names_the_first_ones():
    tracker = EpisodeTracker(list(range(4096)), list(range(4096)))
    shown = tracker.labels(range(4096))
    assert shown.startswith("environment 0 (episode 0, ") and shown.count("environment") == 8 and shown.endswith(", …")
    stored, restored = (make_collector(make_batch("CartPole-v1", 20), 1) for _ in range(2))
    stored.environments.reset()
    state = stored.state_dict() | {"environments": stored.environments.state_dict()}
    for record in state["environments"]["environments"]:
        record["observation"] += 1
    with pytest.warns(UserWarning, match=r"^environments 0, 1, 2, 3, 4, 5, 6, 7, … of CartPole-v1 could not"):
        restore(restored, [state], 0, "CartPole-v1")
