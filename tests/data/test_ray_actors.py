"""Ray actors from the learner's side, with a fake Ray in this process; `test_ray_cluster` uses Ray."""

import importlib.util
import itertools
import signal
import sys

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only

from lightning_rl import IMPALA
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.validation import ConfigurationError
from tests import probes  # noqa: F401 - registers environments
from tests.data.fake_ray import FakeRay
from tests.data.test_process_actors import FAILS, Versions, make
from tests.helpers import MemoryLogger, make_data, make_trainer, merged

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    threads = torch.get_num_threads()
    yield fake
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    assert not fake.running and set(fake.killed) == set(fake.handles)


def make_actors(env_id="CartPole-v1", **options):
    return make_data(env_id, **merged({"actors": {"count": 2, "backend": "ray"}, "rollouts_per_epoch": 8}, options))


class At(Callback):
    """Calls a function before the update with a given rollout."""

    def __init__(self, number, action):
        self.number, self.action = number, action

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.number:
            self.action()


def breaks(rollouts):
    """Number of rollouts that do not begin where the one before ended."""
    return sum(
        not torch.equal(one.observations[-1], other.observations[0]) for one, other in itertools.pairwise(rollouts)
    )


def test_rollouts_were_collected_with_their_policy_version_and_are_contiguous(ray):
    data = make_actors(
        actors={"resources": {"CPU": 2, "GPU": 0.5, "arena": 1}, "ray_address": "somewhere", "prefetch": 2}
    )
    ray.cluster_resources = lambda: {"CPU": 4, "GPU": 1, "arena": 2}
    model, seen, handlers = make(data, normalization={"observations": True}), Versions(), set()
    ray.on_wait = lambda: handlers.add(signal.getsignal(signal.SIGTERM))
    make_trainer(callbacks=[seen]).fit(model, data)
    assert [version - rollout.policy_version for version, rollout in enumerate(seen.rollouts)] == [0, 1, 2, 3] + 4 * [4]
    for rollout in seen.rollouts:
        model.policy.load_state_dict(seen.policies[rollout.policy_version])
        again = model.policy.log_prob(rollout.observations[:-1], rollout.actions)
        assert (again - rollout.log_probs).abs().max() <= 1e-6
    of_actor = [[rollout for rollout in seen.rollouts if rollout.actor == actor] for actor in range(2)]
    assert [len(own) for own in of_actor] == [4, 4] and [breaks(own) for own in of_actor] == [0, 0]
    first, second = (own[0].observations[0] for own in of_actor)
    assert not torch.equal(first, second)
    weights = [value for value in ray.puts if not isinstance(value, torch.nn.Module)]
    assert len(ray.puts) == len(weights) + 1 and len(weights) == 9  # once for each version
    assert ray.address == "somewhere" and ray.sessions == 1
    assert handlers and ray.on_sigterm not in handlers  # signals end the run as without Ray
    placed = {"num_cpus": 2, "num_gpus": 0.5, "resources": {"arena": 1}}
    assert [handle.options for handle in ray.handles] == 2 * [placed | {"max_restarts": -1, "max_task_retries": -1}]


def test_dead_actor_is_replaced_with_a_warning_and_counted(ray):
    data, seen, logger = make_actors(rollouts_per_epoch=16), Versions(), MemoryLogger()
    callbacks = [seen, At(4, lambda: ray.handles[1].die()), At(9, lambda: ray.handles[1].die())]
    trainer = make_trainer(callbacks=callbacks, logger=logger, log_every_n_steps=8)
    model = make(data)
    told = r"actor 1, with 2 environments CartPole-v1 \(seeds from \d+\), is gone \(process \d+ on .*\): it died. Ray"
    with pytest.warns(UserWarning, match=told) as warned:
        trainer.fit(model, data)
    assert sum("is gone" in str(w.message) for w in warned) == 1
    assert [value for _, value in logger.rows("rollout/actors_lost")] == [1, 1]
    assert len(seen.rollouts) == model.policy_version == 16 and model.env_steps == 16 * 32
    stays, dies = ([rollout for rollout in seen.rollouts if rollout.actor == actor] for actor in range(2))
    assert breaks(stays) == 0 and breaks(dies) == 2
    # Each process begins other episodes, and no rollout is requested twice.
    begins = [dies[0]] + [
        b for a, b in itertools.pairwise(dies) if not torch.equal(a.observations[-1], b.observations[0])
    ]
    starts = [tuple(rollout.observations[0].flatten().tolist()) for rollout in begins]
    assert len(set(starts)) == 3 and all(rollout.starts[0].all() for rollout in begins)
    numbers = [args[0] for name, args in ray.handles[1].calls if name == "collect"]
    assert numbers == list(range(len(numbers))) and len(ray.handles[1].workers) == 3


def test_replacement_process_has_to_join_first(ray):
    data, seen = make_actors(actors={"count": 1}), Versions()
    with pytest.warns(UserWarning, match=r"is gone \(process .*\): another process is in its place"):
        make_trainer(callbacks=[seen, At(3, lambda: ray.handles[0].replace())]).fit(make(data), data)
    assert sum(rollout.actors_lost for rollout in seen.rollouts) == 1 and breaks(seen.rollouts) == 1


def test_an_actor_that_joins_later_begins_with_the_newest_weights(ray):
    data, seen = make_actors(), Versions()
    ray.cpus = 1

    ray.on_wait = lambda: setattr(ray.handles[1], "has_place", len(seen.rollouts) >= 5)
    with pytest.warns(
        UserWarning, match=r"actors.count=2: the Ray cluster has room for 1 of them, with {'CPU': 1} each"
    ):
        make_trainer(callbacks=[seen]).fit(make(data), data)
    first = next(rollout for rollout in seen.rollouts if rollout.actor == 1)
    assert first.policy_version >= 4 and first.starts[0].all()


def test_failure_of_an_environment_ends_the_run(ray):
    data = make_actors("Probe/Failing-v0", env={"kwargs": FAILS})
    place = (
        r"actor 0: environment 0 \(episode 0, seed \d+, step 3\) raised in step: ArithmeticError: the physics exploded"
    )
    with pytest.raises(EnvironmentFailure, match=place) as caught:
        make_trainer().fit(make(data), data)
    (note,) = caught.value.__notes__
    assert note.startswith("In the process of the actor:") and 'raise ArithmeticError("the physics exploded")' in note


def test_actor_that_dies_repeatedly_ends_the_run(ray):
    data = make_actors(actors={"count": 1})
    ray.on_wait = lambda: ray.handles[0].die() if ray.handles[0].calls[-1][0] == "collect" else None
    with (
        pytest.warns(UserWarning, match="is gone"),
        pytest.raises(EnvironmentFailure, match=r"it died; 3 replacements in a row failed before"),
    ):
        make_trainer().fit(make(data), data)
    assert ray.handles[0].lives == 4


@pytest.mark.parametrize(
    ("joined", "message"),
    [
        (False, r"no actor was started within actors.timeout=0.2 seconds: each needs {'CPU': 1}, and .* {'CPU': 8.0}"),
        (True, r"actor 0, with 2 environments .* gave no rollout within actors.timeout=0.2 seconds: its process"),
    ],
)
def test_actors_that_are_not_started_or_hang_end_the_run(ray, joined, message):
    data = make_actors(actors={"count": 1, "timeout": 0.2})

    def look():
        ray.handles[0].has_place = joined and ray.handles[0].calls[-1][0] == "join"

    ray.on_wait = look
    with pytest.raises(EnvironmentFailure, match=message):
        make_trainer().fit(make(data), data)


def test_a_signal_is_honored_while_no_actor_finds_a_place(ray):
    data = make_actors(actors={"count": 1})

    def look():
        ray.handles[0].has_place = False
        signal.raise_signal(signal.SIGTERM)

    ray.on_wait = look
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.warns(UserWarning, match="nothing was saved"), pytest.raises(SystemExit) as ended:
            make_trainer().fit(make(data), data)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM


def test_existing_ray_session_stays_open(ray):
    ray.running = True
    data = make_actors(rollouts_per_epoch=1)
    make_trainer().fit(make(data), data)
    assert ray.running and ray.sessions == 0 and len(ray.killed) == 2
    ray.shutdown()


def test_ray_address_without_a_cluster_is_refused(ray):
    data = make_actors(actors={"ray_address": "nowhere"})
    with pytest.raises(
        ConfigurationError, match=r"actors.ray_address='nowhere' leads to no Ray cluster \(nobody answers\)"
    ):
        make_trainer().fit(make(data), data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actors": {"backend": "threads"}}, "actors.backend='threads'.*processes, ray"),
        ({"actors": {"backend": "processes", "resources": {"CPU": 1}}}, "actors.resources=.*actors.backend='ray'"),
        (
            {"actors": {"backend": "processes", "ray_address": "auto"}},
            "actors.ray_address='auto'.*actors.backend='ray'",
        ),
        ({"actors": {"start_method": "fork"}}, "actors.start_method='fork'.*None with actors.backend='ray'"),
        ({"actors": {"count": 0}}, "actors.backend='ray'.*processes where actors.count is 0"),
        ({"backend": "async"}, "backend='async'.*beside actors.count"),
    ],
)
def test_bad_options_are_refused(ray, options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_actors(**options)


def test_missing_ray_package_is_reported_at_once(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else found(name, *rest))
    with pytest.raises(ConfigurationError, match=r"actors.backend='ray'.*pip install 'lightning-rl\[ray\]'"):
        make_actors()


def test_actors_compute_in_the_precision_of_the_learner(ray):
    data, seen = make_actors(rollouts_per_epoch=1), Versions()
    make_trainer(callbacks=[seen], precision="64-true").fit(make(data, IMPALA), data)
    assert seen.rollouts[0].log_probs.dtype == torch.float64
