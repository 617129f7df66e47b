"""Asynchronous actors in processes: their rollouts, failures, signals and resume."""

import itertools
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rl import CLEAR, IMPALA, PPO, LastCheckpoint, OverlappedPPO
from lightning_rl.data import process_actors
from lightning_rl.data.actors import ActorSetup
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.validation import ConfigurationError
from tests import nested_probes, probes  # noqa: F401 - they register environments
from tests.helpers import MemoryLogger, Recorder, make_data, make_trainer, merged, parameters_of

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc, and forks"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


def make_actors(env_id="CartPole-v1", **options):
    small = {"actors": {"count": 1, "start_method": "fork"}, "rollouts_per_epoch": 4}
    return make_data(env_id, **merged(small, options))


def make(data, algorithm=IMPALA, **options):
    torch.manual_seed(0)
    small = {"policy": {"hidden_sizes": (8,)}, "learning_rate": 0.01}
    return algorithm(data.observation_space, data.action_space, **merged(small, options))


def children():
    """Return the child processes, except Python's resource tracker."""
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in found if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = set(children())
    yield
    assert set(children()) == before


class Versions(Callback):
    """Keeps the rollouts, and the policy of each version."""

    def __init__(self):
        self.rollouts, self.policies = [], {}

    def keep(self, module):
        state = {name: x.clone() for name, x in module.policy.state_dict().items()}
        self.policies[module.policy_version] = state

    def on_train_start(self, trainer, pl_module):
        self.keep(pl_module)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rollouts.append(batch)

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.keep(pl_module)


class UntilBothDelivered(Versions):
    """Ends the run after an epoch in which each of two actors has delivered twice."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = all(len(rollouts) > 1 for rollouts in self.of_actors())

    def of_actors(self):
        return [[rollout for rollout in self.rollouts if rollout.actor == actor] for actor in range(2)]


def test_rollouts_were_collected_with_their_policy_version():
    """Weights, normalizer and version belong together, whenever they were read."""
    data = make_actors(actors={"count": 2, "prefetch": 2}, rollouts_per_epoch=12, rollout_length=8)
    model = make(data, normalization={"observations": True, "rewards": True})
    seen, logger = UntilBothDelivered(), MemoryLogger()
    make_trainer(callbacks=[seen], logger=logger, log_every_n_steps=4, max_epochs=20).fit(model, data)
    lags = [version - rollout.policy_version for version, rollout in enumerate(seen.rollouts)]
    windows = [lags[i : i + 4] for i in range(0, len(lags), 4)]
    assert max(lags) > 0 and min(lags) >= 0
    for rollout in seen.rollouts:
        model.policy.load_state_dict(seen.policies[rollout.policy_version])
        again = model.policy.log_prob(rollout.observations[:-1], rollout.actions)
        assert (again - rollout.log_probs).abs().max() <= 1e-6
        assert (model.policy.value(rollout.observations)[:-1] - rollout.values).abs().max() <= 1e-6
    # Each actor continues where its last rollout ended, in separate environments.
    for own in seen.of_actors():
        assert len(own) > 1
        for one, other in itertools.pairwise(own):
            assert torch.equal(one.observations[-1], other.observations[0])
    first, second = (own[0].observations[0] for own in seen.of_actors())
    assert not (first.unsqueeze(0) == second.unsqueeze(1)).all(-1).any()
    assert model.env_steps == len(lags) * 16 and model.policy_version == len(lags)
    assert len(model.reward_normalizer.discounted_return) == 4  # of both actors' environments
    means = [value for _, value in logger.rows("train/policy_lag")]
    assert means == pytest.approx([sum(window) / 4 for window in windows])
    assert [value for _, value in logger.rows("train/policy_lag_max")] == [max(window) for window in windows]
    assert not any(value for _, value in logger.rows("rollout/dropped"))
    assert logger.rows("rollout/episode_return")


def test_one_actor_is_one_rollout_ahead():
    data = make_actors()
    model, recorder = make(data), Recorder()
    make_trainer(callbacks=[recorder]).fit(model, data)
    lags = recorder.column("policy_lag")
    assert lags[0] == 0 and 1 in lags and set(lags) <= {0, 1}  # 0 if the actor read the weights after the update


@pytest.mark.parametrize(("prefetch", "ahead"), [(1, 3), (None, 5), (2, 5)])
def test_several_actors_do_not_wait_for_the_learner(prefetch, ahead):
    """During the first update they collect the rollouts requested at the start, and one more each."""
    data = make_actors(actors={"count": 2, "prefetch": prefetch}, rollouts_per_epoch=6)

    class SlowOnce(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                time.sleep(0.5)

    seen = Versions()
    make_trainer(callbacks=[SlowOnce(), seen]).fit(make(data), data)
    assert sum(rollout.policy_version == 0 for rollout in seen.rollouts) == ahead


def test_rollouts_that_are_too_old_are_dropped_and_counted():
    data = make_actors(actors={"prefetch": 3, "max_policy_lag": 1}, rollouts_per_epoch=8)

    class Slow(Callback):
        def on_train_batch_end(self, *_):
            time.sleep(0.05)  # the actor has three ready by then

    model, recorder, logger, seen = make(data), Recorder("env_steps"), MemoryLogger(), Versions()
    callbacks = [recorder, Slow(), seen]
    make_trainer(callbacks=callbacks, logger=logger, log_every_n_steps=1).fit(model, data)
    assert max(recorder.column("policy_lag")) <= 1
    dropped = [value for _, value in logger.rows("rollout/dropped")]
    assert dropped == [rollout.dropped for rollout in seen.rollouts] and sum(dropped) > 0
    assert recorder.column("env_steps") == [32 * (k + 1) for k in range(8)]  # only rollouts that were learned from


@pytest.mark.parametrize(
    ("env_id", "algorithm", "options"),
    [
        ("CartPole-v1", IMPALA, {"policy": {"memory": {"kind": "lstm", "hidden_size": 4}}}),
        ("Probe/Sensors-v0", CLEAR, {"normalization": {"observations": True}}),
        ("ALE/Pong-v5", IMPALA, {}),
        ("CartPole-v1", OverlappedPPO, {"policy": {"memory": {"kind": "gru", "hidden_size": 4}}, "num_minibatches": 2}),
    ],
)
def test_actors_support_all_observations_and_policies(env_id, algorithm, options):
    data = make_actors(env_id, rollouts_per_epoch=2, rollout_length=4)
    model = make(data, algorithm, **options)
    before, seen = parameters_of(model), Versions()
    make_trainer(callbacks=[seen]).fit(model, data)
    assert any(not torch.equal(x, before[name]) for name, x in model.named_parameters())
    rollout = seen.rollouts[0]
    assert rollout.observations.dtype == torch.uint8 if env_id.startswith("ALE") else True
    assert (rollout.memory is not None) == ("memory" in options.get("policy", {}))


def test_spawned_actors_use_the_precision_of_the_learner():
    data = make_actors(actors={"start_method": "spawn"}, rollouts_per_epoch=2)
    model, seen = make(data), Versions()
    make_trainer(callbacks=[seen], precision="64-true").fit(model, data)
    versions = [rollout.policy_version for rollout in seen.rollouts]
    assert versions[0] == 0 and versions[1] in (0, 1)  # 1 if the actor read the weights after the first update
    assert seen.rollouts[0].log_probs.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_policy_must_be_picklable():
    data = make_actors(actors={"start_method": "spawn"})
    model = make(data)
    model.policy.hook = lambda x: x
    with pytest.raises(ConfigurationError, match=r"actors\.start_method='spawn' cannot send the policy"):
        make_trainer().fit(model, data)


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_arguments_of_environments_must_be_picklable():
    kwargs = {"sutton_barto_reward": lambda: True}
    data = make_actors(actors={"start_method": "spawn"}, env={"kwargs": kwargs})
    with pytest.raises(ConfigurationError, match=r"cannot send the policy or env\.kwargs to a process \(.*<lambda>"):
        make_trainer().fit(make(data), data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actors": {"count": -1}}, "actors.count=-1 is not valid: expected an integer of at least 0"),
        ({"actors": {"prefetch": 0}}, "actors.prefetch=0"),
        ({"actors": {"start_method": "thread"}}, "actors.start_method='thread'.*fork, spawn$"),
        ({"actors": {"timeout": 0}}, "actors.timeout=0"),
        ({"actors": {"max_policy_lag": -1}}, "actors.max_policy_lag=-1"),
        (
            {"actors": {"count": 0, "start_method": None, "max_policy_lag": 2}},
            "actors.max_policy_lag=2.*where actors.count is 0",
        ),
        ({"actors": {"count": 0, "start_method": None, "prefetch": 2}}, "actors.prefetch=2.*where actors.count is 0"),
        ({"actors": {"count": 0, "start_method": None, "timeout": 9}}, "actors.timeout=9.*where actors.count is 0"),
        ({"actors": {"count": 0}}, "actors.start_method='fork'.*None where actors.count is 0"),
        ({"backend": "async"}, "backend='async'.*beside actors.count"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_actors(**options)


def test_on_policy_algorithms_refuse_actors():
    data = make_actors()
    with pytest.raises(
        ConfigurationError, match=r"actors.count=1.*PPO learns from rollouts of the current policy alone"
    ):
        make_trainer().fit(make(data, PPO), data)
    assert data._source is None


FAILS = {"how": "raise", "episode_seed": None, "at": 3, "lengths": (5,)}


def test_failure_of_an_environment_has_place_and_traceback():
    data = make_actors("Probe/Failing-v0", env={"kwargs": FAILS})
    with pytest.raises(EnvironmentFailure) as caught:
        make_trainer().fit(make(data), data)
    place = (
        r"actor 0: environment 0 \(episode 0, seed \d+, step 3\) raised in step: ArithmeticError: the physics exploded"
    )
    assert caught.match(place)
    (note,) = caught.value.__notes__
    assert note.startswith("In the process of the actor:") and 'raise ArithmeticError("the physics exploded")' in note


@pytest.mark.parametrize("how", ["SystemExit", "KeyboardInterrupt"])
def test_environment_that_ends_its_actor_is_named(how):
    data = make_actors("Probe/Failing-v0", env={"kwargs": FAILS | {"how": how}})
    with pytest.raises(EnvironmentFailure, match=rf"^actor 0: environment 0 \(episode 0, seed \d+, step 3\) .*: {how}"):
        make_trainer().fit(make(data), data)


def test_failed_environment_is_replaced_in_its_actor():
    data = make_actors("Probe/Failing-v0", env={"kwargs": FAILS | {"at": 5}, "on_failure": "restart"}, rollout_length=4)
    seen = Versions()
    with pytest.warns(UserWarning, match="environment 0 .* raised in step"):
        make_trainer(callbacks=[seen]).fit(make(data), data)
    assert sum(len(rollout.failures) for rollout in seen.rollouts) > 0


def test_environments_of_an_actor_that_refuse_a_setting_are_closed(monkeypatch):
    closed = []
    monkeypatch.setattr(probes.Counter, "close", lambda env: closed.append(env))
    data = make_data("Probe/Counter-v0", num_envs=2)
    data.set_env_settings({"width": 3})
    with pytest.raises(ConfigurationError, match=r"attributes=\['width'\]"):
        ActorSetup(data._sampler, 0, 0).start_sampler(torch.nn.Linear(1, 1), 0)
    assert len(closed) == 2


def test_an_actor_that_hangs_is_named_and_ended():
    data = make_actors("Probe/Failing-v0", env={"kwargs": FAILS | {"how": "hang"}}, actors={"timeout": 0.5})
    begin = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=r"actor 0, with 2 environments .*within actors.timeout=0.5 seconds"):
        make_trainer().fit(make(data), data)
    assert time.monotonic() - begin < 20


def test_time_limit_of_a_rollout_excludes_the_time_that_a_run_is_stopped(monkeypatch):
    stopped, wait = [], process_actors.wait

    def wait_as_if_stopped(*arguments):
        if stopped:
            return wait(*arguments)
        stopped.append(1000.0)
        return []

    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + sum(stopped))
    monkeypatch.setattr(process_actors, "wait", wait_as_if_stopped)
    monkeypatch.setattr(process_actors, "time", clock)
    data = make_actors()
    make_trainer(max_epochs=1).fit(make(data), data)
    assert stopped == [1000.0]


def test_time_limit_of_a_rollout_excludes_the_time_that_a_run_is_stopped_during_an_update(monkeypatch):
    stopped = []

    class Stopped(Callback):
        def on_train_batch_end(self, *arguments):
            if not stopped:
                stopped.append(1000.0)

    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + sum(stopped))
    monkeypatch.setattr(process_actors, "time", clock)
    data = make_actors(rollout_length=1000)  # the actor still collects after the update
    make_trainer(max_steps=2, callbacks=[Stopped()]).fit(make(data), data)


def test_an_actor_that_is_killed_is_named_where_a_rollout_is_taken():
    """Not in the middle of an update, when the signal of the ended process arrives."""
    data = make_actors(actors={"count": 2})
    updating = []

    class Kill(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 1:
                process = data._source._processes[1]
                process.kill()
                process.join()

        def on_exception(self, trainer, pl_module, exception):
            updating.append(pl_module.updating)

    model = make(data)
    with pytest.raises(EnvironmentFailure, match=r"actor 1, .* is gone: its process \d+ was killed by SIGKILL"):
        make_trainer(callbacks=[Kill()]).fit(model, data)
    assert updating == [False] and model.policy_version == 2


@pytest.fixture
def usual_handlers():
    """Signal handlers of a program that was started in a terminal."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def interrupted_after(seconds, signum, fit, ready=None):
    """Return the exit status of a fit that gets a signal after some seconds, and the seconds until it ended."""
    sent = []

    def send():
        assert ready is None or ready.wait(60)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signum)

    timer = threading.Timer(seconds, send)
    timer.start()
    with pytest.raises(SystemExit) as ended:
        fit()
    timer.join()
    return ended.value.code, time.monotonic() - sent[0]


def test_a_signal_is_honored_within_five_seconds_while_all_actors_are_stopped(usual_handlers, tmp_path):
    stopped = threading.Event()

    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if pl_module.policy_version == 2:
                for process in data._source._processes:
                    os.kill(process.pid, signal.SIGSTOP)
                stopped.set()

    data = make_actors(actors={"count": 2}, rollouts_per_epoch=1000)
    model = make(data)
    trainer = make_trainer(callbacks=[Stop(), LastCheckpoint(tmp_path)], enable_checkpointing=True)
    status, seconds = interrupted_after(1.5, signal.SIGTERM, lambda: trainer.fit(model, data), stopped)
    assert status == 128 + signal.SIGTERM and seconds < 5
    # A checkpoint was saved, and a run resumes from it.
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["lightning_rl"]["policy_version"] == model.policy_version >= 2
    assert all(torch.equal(x, saved["state_dict"][name]) for name, x in model.state_dict().items())
    again = make_actors(rollouts_per_epoch=model.policy_version + 2)
    resumed = make(again)
    make_trainer().fit(resumed, again, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.policy_version == model.policy_version + 2


def test_a_signal_is_honored_before_the_first_rollout(usual_handlers, monkeypatch):
    monkeypatch.setattr("lightning_rl.data.process_actors._GRACE", 0.1)
    data = make_actors("Probe/Failing-v0", env={"kwargs": FAILS | {"how": "hang"}})
    model = make(data)
    with pytest.warns(UserWarning, match="nothing was saved: the Trainer saves no checkpoints"):
        status, seconds = interrupted_after(1.0, signal.SIGINT, lambda: make_trainer().fit(model, data))
    assert status == 128 + signal.SIGINT and seconds < 5
    assert model.policy_version == 0


@pytest.mark.parametrize(("prepared", "found"), [(False, "SigBlk"), (True, "SigIgn")])
def test_no_signal_to_all_processes_ends_an_actor_not_even_one_that_begins(prepared, found, monkeypatch):
    """Processes inherit the signals that the learner blocks while it starts them, until they ignore them."""
    if not prepared:  # as before the first rollout
        monkeypatch.setattr(process_actors, "live_with_parent", lambda: None)
    left_alone = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            status = Path(f"/proc/{data._source._processes[0].pid}/status").read_text()
            masks = {name: int(mask, 16) for name, mask in re.findall(r"(Sig\w+):\s(\w+)", status)}
            sets = {name: {s for s in (signal.SIGINT, signal.SIGTERM) if masks[name] >> s - 1 & 1} for name in masks}
            left_alone.append([name for name in ("SigBlk", "SigIgn") if sets[name]])
            assert len(sets[found]) == 2

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    # Background programs of a shell ignore SIGINT, and so would their actors.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    data = make_actors(rollouts_per_epoch=1)
    make_trainer(callbacks=[Look()]).fit(make(data), data)
    signal.signal(signal.SIGINT, handler)
    assert left_alone == [[found]]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_learner_that_is_interrupted_while_it_starts_actors_leaves_none(monkeypatch):
    """It would wait for them forever at exit, since they ignore the signal to end."""
    begun, data = [], make_actors(actors={"count": 2})
    start = process_actors.ProcessActors._start

    def interrupted(actors, *args):
        start(actors, *args)
        begun.extend(process.pid for process in actors._processes)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # which waits
        raise OSError("no more processes")

    monkeypatch.setattr(process_actors.ProcessActors, "_start", interrupted)
    # A handler of the program, which is kept, and raises KeyboardInterrupt.
    before = signal.signal(signal.SIGINT, lambda signum, frame: signal.default_int_handler(signum, frame))
    try:
        with pytest.raises(SystemExit) as ended:
            make_trainer().fit(make(data), data)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 1
    assert isinstance(ended.value.__context__, KeyboardInterrupt)
    assert isinstance(ended.value.__context__.__context__, OSError)
    assert len(begun) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in begun)


def take_lock(lock):
    """Keep the lock, as an actor that is killed while it reads the weights."""
    dead = multiprocessing.get_context("fork").Process(target=lock.acquire)
    dead.start()
    dead.join()


def test_learner_ends_although_a_killed_actor_holds_the_lock():
    data = make_actors(rollouts_per_epoch=1)

    class Take(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            take_lock(data._source._weights._lock)

    begin = time.monotonic()
    make_trainer(callbacks=[Take()]).fit(make(data), data)
    assert time.monotonic() - begin < 20


def test_an_actor_killed_while_it_reads_the_weights_is_named_within_seconds():
    data, killed = make_actors(actors={"count": 2}), []

    class Kill(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            source = data._source
            take_lock(source._weights._lock)
            source._processes[1].kill()
            killed.append(time.monotonic())

    model = make(data)
    with pytest.raises(EnvironmentFailure, match=r"actor 1, .* is gone: its process \d+ was killed by SIGKILL"):
        make_trainer(callbacks=[Kill()]).fit(model, data)
    assert len(killed) == 1 and time.monotonic() - killed[0] < 10
    assert not model.updating and model.policy_version == 1  # the update is complete


def test_a_faster_actor_does_not_starve_the_other():
    """Both always have rollouts ready here, and the learner alternates between them."""
    data, seen = make_actors(actors={"count": 2, "prefetch": 3}, rollouts_per_epoch=12), Versions()

    class Slow(Callback):
        def on_train_batch_start(self, *_):
            time.sleep(0.1)

    make_trainer(callbacks=[Slow(), seen]).fit(make(data), data)
    assert sorted(rollout.actor for rollout in seen.rollouts[2:]) == [0] * 5 + [1] * 5


def test_actor_collects_ahead_while_the_learner_is_busy():
    """Rollouts larger than the buffer of a pipe do not block the next ones."""
    data = make_actors(actors={"prefetch": 3}, rollout_length=250, num_envs=16, rollouts_per_epoch=4)

    def seconds_of(process):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]

    class SlowOnce(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            (actor,), seconds = multiprocessing.active_children(), None
            while batch_idx == 0 and seconds != (seconds := seconds_of(actor)):  # until it has nothing to do
                time.sleep(1)

    seen = Versions()
    make_trainer(callbacks=[SlowOnce(), seen]).fit(make(data), data)
    assert [rollout.policy_version for rollout in seen.rollouts] == [0, 0, 0, 0]


def test_resumed_run_begins_new_episodes(tmp_path):
    options = {"normalization": {"observations": True, "rewards": True}}
    data = make_actors()
    model = make(data, **options)
    trainer = make_trainer()
    trainer.fit(model, data)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    first, again = Versions(), make_actors()
    resumed = make(again, **options)
    loaded = {}

    class AtStart(Callback):
        def on_train_start(self, trainer, pl_module):
            loaded.update(
                parameters_of(pl_module) | {"env_steps": pl_module.env_steps, "optimizer": trainer.optimizers}
            )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_epochs=2, callbacks=[AtStart(), first]).fit(resumed, again, ckpt_path=tmp_path / "x.ckpt")
    told = [str(w.message) for w in caught if "new episodes" in str(w.message)]
    assert len(told) == 1 and "weights, optimizers and counters are restored" in told[0]
    assert all(torch.equal(x, loaded[name]) for name, x in parameters_of(model).items())
    assert loaded["env_steps"] == model.env_steps == 4 * 32
    assert resumed.policy_version == 8 and resumed.env_steps == 8 * 32
    assert first.rollouts[0].starts[0].all() and first.rollouts[0].policy_version == 4
    assert data._sampler.starts == 1 and again._sampler.starts == 2  # so other episodes

    # Without actors, their counts are no longer logged.
    logger, in_step = MemoryLogger(), make_data(rollouts_per_epoch=1)
    model = make(in_step, **options)
    make_trainer(max_epochs=3, logger=logger, log_every_n_steps=1).fit(model, in_step, ckpt_path=tmp_path / "x.ckpt")
    assert not logger.rows("train/policy_lag_max")
    assert [step for step, _ in logger.rows("train/loss")] == [5 * 32, 6 * 32]
