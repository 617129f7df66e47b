"""The Lightning data module that collects rollouts and plays evaluation episodes."""

from __future__ import annotations

import contextlib
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import IO, Any, Generic, Never, Self, TypeVar, cast

import torch
from gymnasium import spaces
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn  # type: ignore[attr-defined]
from torch import nn

from lightning_rl.data.actors import ActorConfig, ActorOptions, Actors, ActorSetup
from lightning_rl.data.collector import Sampler
from lightning_rl.data.evaluation import EvaluationConfig, EvaluationOptions, Evaluator
from lightning_rl.data.process_actors import ProcessActors
from lightning_rl.data.ray_actors import RayActors
from lightning_rl.distributed import gather_ranks
from lightning_rl.environments import (
    Backend,
    EnvConfig,
    EnvironmentFailure,
    EnvironmentSpec,
    EnvOptions,
    FilmMaker,
    Spaces,
    make_environments,
    spaces_of,
)
from lightning_rl.environments.contract import EVALUATION, FILMING, TESTING
from lightning_rl.files import read_data
from lightning_rl.options import (
    changed,
    default_groups,
    defaults_of,
    flat,
    nested,
    refuse_unknown_options,
    with_changes,
)
from lightning_rl.policies.interface import Policy
from lightning_rl.rollouts.rollout import LOGGED, Episode, Rollout
from lightning_rl.validation import (
    ConfigurationError,
    check,
    check_names,
    check_positive_int,
    class_only,
    constructor_options,
    did_you_mean,
    is_int,
    loading,
    to_plain_data,
)

T = TypeVar("T")
_SECONDS_BEFORE_HINT = 60.0
# What may be faster than a backend whose environments take most of the time.
_FASTER = {
    "sync": "backend='native' or 'envpool', if they have this environment, or on several cores backend='async', a "
    "process for each environment, or actors.count, with an algorithm that corrects for older policies",
    "async": "backend='native' or 'envpool', if they have this environment, or a num_envs of about the number of cores",
}
_LARGER = "a larger num_envs with a shorter rollout_length, since environments step together"


class OnDemandLoader(Generic[T]):
    """A loader that makes each of its `length` batches when the Trainer fetches it.

    It has a length because Lightning prefetches from loaders without one: each rollout would be collected with the
    parameters from before the last update.
    """

    def __init__(self, make_batch: Callable[[], T], length: int) -> None:
        self.make_batch = make_batch
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[T]:
        for _ in range(self.length):
            yield self.make_batch()


class RolloutDataModule(LightningDataModule):
    """Owns the environments and yields rollouts and evaluation episodes.

    One training batch is one `Rollout` of `rollout_length` steps in each of `num_envs` environments. The rollout is
    collected with the current parameters when the Trainer fetches it, or by asynchronous `actors` with earlier ones.
    One batch of validation, test or prediction is a list of `evaluation.episodes` whole episodes, played in separate
    environments with raw rewards and frozen normalizers: the same episodes each time, with other seeds than training.

    An option out of range, or an environment that cannot be made, raises a `ConfigurationError`.

    Args:
        env_id: A Gymnasium id (`package:id` imports the package first), or an EnvPool task.
        num_envs: Number of training environments on each rank.
        rollout_length: Steps of each environment in a rollout.
        rollouts_per_epoch: Rollouts in an epoch: how often the Trainer validates and checkpoints by default.
        backend: `sync` steps the environments one after another in this process, `async` in one worker process each,
            `native` uses the environment's own vectorized version, `torch` a vectorized version that takes and returns
            tensors, and `envpool` EnvPool.
        env: Options of the environments. A dict changes single fields of the default.
        actors: Options of asynchronous actors, also as a dict.
        evaluation: Options of validation, test and prediction, also as a dict.
        info_keys: Keys of `info` to log: means over steps as `rollout/<key>`, over last steps of episodes as `…_last`.
        seed: Seed of environments and actions. None takes the seed of `seed_everything`, or a random one.
    """

    has_recorded_steps = False

    def __init__(
        self,
        env_id: str,
        num_envs: int = 8,
        rollout_length: int = 128,
        rollouts_per_epoch: int = 10,
        *,
        backend: Backend = "sync",
        env: EnvOptions = EnvConfig(),
        actors: ActorOptions = ActorConfig(),
        evaluation: EvaluationOptions = EvaluationConfig(),
        info_keys: Sequence[str] = (),
        seed: int | None = None,
        **unknown: Never,  # refused, with a suggestion
    ) -> None:
        super().__init__()
        refuse_unknown_options(type(self), unknown)
        check(isinstance(env_id, str), "env_id", env_id, "a string; register custom environments first")
        for name in ("num_envs", "rollout_length", "rollouts_per_epoch"):
            check_positive_int(name, locals()[name])
        check(seed is None or (is_int(seed) and seed >= 0), "seed", seed, "an integer of at least 0, or None")
        check_names("info_keys", info_keys, "a list of keys")
        taken = [key for key in info_keys if key in LOGGED]
        check(not taken, "info_keys", taken, "keys whose rollout/<key> is not logged already")
        groups = default_groups(type(self))
        self.spec = EnvironmentSpec(env_id, changed("env", groups["env"], env), backend)
        self.eval_spec = self.spec.for_evaluation()
        self.evaluation: EvaluationConfig = changed("evaluation", groups["evaluation"], evaluation)
        self.actors: ActorConfig = changed("actors", groups["actors"], actors)
        self.actors.check(backend)
        self.num_envs = num_envs
        self.rollout_length = rollout_length
        self.rollouts_per_epoch = rollouts_per_epoch
        self.info_keys = list(info_keys)
        self.seed = seed
        self._seed_given = seed is not None
        self._sampler = Sampler(self.spec, num_envs, rollout_length, self.info_keys)
        self._source: Actors | None = None
        self._evaluator = Evaluator(self.eval_spec)
        self._while_waiting: Callable[[], None] | None = None
        # Policy version of the latest rollout that was begun.
        self._collected_version: int | None = None
        self._rollouts = 0
        self._missing_infos = set(self.info_keys)
        self._warned_of_failure = False
        self._timed_since: float | None = None
        self._env_seconds = 0.0
        self._suggested = False
        super().save_hyperparameters({})  # saves nothing, but makes the Trainer log `hparams_initial`

    @class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,  # as torch.load has it
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        trust: Sequence[str] = (),
        **kwargs: Any,  # options
    ) -> Self:
        """Return the data module of a checkpoint; see `OnPolicyAlgorithm.load_from_checkpoint`.

        A subclass with its own constructor stores its options by `save_hyperparameters`. `kwargs` replace or add
        options; a `ConfigurationError` names an option that is neither stored nor in `kwargs`.
        """
        check(hparams_file is None, "hparams_file", hparams_file, "None; pass options as keyword arguments")
        checkpoint = read_data(checkpoint_path, map_location or "cpu", weights_only, "checkpoint_path")
        stored, state = (checkpoint.get(key, {}) for key in (cls.CHECKPOINT_HYPER_PARAMS_KEY, cls.__qualname__))
        if cls.__init__ is RolloutDataModule.__init__:
            named = f"{cls.__name__}.load_from_checkpoint"
            stored = options_of_run(cls, state.get("settings", {}), kwargs, named) | stored
        with loading(trust):
            options = constructor_options(cls, stored) | with_changes(stored, kwargs, default_groups(cls))
            try:
                inspect.signature(cls).bind(**options)
            except TypeError as error:
                message = f"{cls.__name__}.load_from_checkpoint: {error}; pass it as a keyword argument"
                raise ConfigurationError(message) from None
            data = cls(**options)
        if state:
            data.load_state_dict(state)
        return data

    def save_hyperparameters(self, *args: Any, frame: FrameType | None = None, **kwargs: Any) -> None:
        """Save the options of a subclass as Lightning does, with groups of options as dicts."""
        caller = inspect.currentframe()
        frame = frame or (None if caller is None else caller.f_back)
        super().save_hyperparameters(*args, frame=frame, **kwargs)
        for name, value in self.hparams.items():
            self.hparams[name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

    @property
    def hparams_initial(self) -> AttributeDict:
        """Hyper-parameters for loggers; all options are in the group `data`, as the model may have the same names."""
        # Without a seed of their own, the runs of a sweep differ in PyTorch's seed only.
        return AttributeDict({**super().hparams_initial, "data": nested(self._settings | {"seed": self._seed})})

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """Observation space of one environment, after the wrappers."""
        return self._spaces.observation

    @property
    def action_space(self) -> spaces.Space[Any]:
        """Action space of one environment, after the wrappers."""
        return self._spaces.action

    @property
    def num_agents(self) -> int:
        """Number of agents in one copy of the environment, one row for each; 1 without PettingZoo."""
        return self._spaces.num_agents

    @cached_property
    def _spaces(self) -> Spaces:
        found = spaces_of(self.spec)
        given = {"num_envs": self.num_envs, "evaluation.num_envs": self.evaluation.num_envs or found.num_agents}
        for name, value in given.items():
            expected = f"a multiple of the {found.num_agents} agents of {self.spec.env_id}, since each agent is a row"
            check(value % found.num_agents == 0, name, value, expected)
        names = [wrapper["class_path"] for wrapper in self.spec.training_wrappers]
        other = spaces_of(self.eval_spec) if names else found
        expected = f"wrappers that keep the spaces {other[:2]}; put others, to {found[:2]}, into env.wrappers"
        check(other == found, "env.training_wrappers", names, expected)
        return found

    @property
    def rollout_shape(self) -> tuple[int, int]:
        """`(T, B)`: steps and environments of one rank's rollout."""
        return self.rollout_length, self.num_envs

    @property
    def num_actors(self) -> int:
        return self.actors.count

    @property
    def rollout_pending(self) -> bool:
        """Whether the latest rollout has been collected, but its update has not finished."""
        module = self.trainer.lightning_module if self.trainer is not None else None
        version = getattr(module, "policy_version", None)
        return version is not None and version == self._collected_version

    # ------------------------------------------------------------------------------------------------ Lightning's hooks

    def train_dataloader(self) -> OnDemandLoader[Rollout]:
        sampler = self._sampler  # the options may have been set since an earlier fit
        sampler.num_envs, sampler.rollout_length, sampler.info_keys = self.num_envs, self.rollout_length, self.info_keys
        self._collected_version = None  # a rollout that an earlier fit did not learn from is dropped
        self._timed_since, self._env_seconds, self._suggested = None, 0.0, False
        return self._loader(self.collect, self.rollouts_per_epoch)

    def val_dataloader(self) -> OnDemandLoader[list[Episode]]:
        return self._loader(self.run_episodes, 1)

    def test_dataloader(self) -> OnDemandLoader[list[Episode]]:
        """Return a loader of one batch of test episodes, with other seeds than in validation."""
        return self._loader(partial(self.run_episodes, role=TESTING), 1)

    def predict_dataloader(self) -> OnDemandLoader[list[Episode]]:
        """Return a loader of one batch of the test episodes with observations, actions and rewards."""
        return self._loader(partial(self.run_episodes, role=TESTING, record=True), 1)

    def _loader(self, make_batch: Callable[[], T], length: int) -> OnDemandLoader[T]:
        if self.trainer is not None and isinstance(strategy := self.trainer.strategy, XLAStrategy):
            # XLA's loader would collect 16 rollouts ahead, with the parameters from before the updates.
            strategy.process_dataloader = lambda loader: loader  # type: ignore[assignment,method-assign]

        return OnDemandLoader(partial(self._make_for_trainer, make_batch), length)

    def _make_for_trainer(self, make_batch: Callable[[], T]) -> T:
        if self.trainer is None or self.trainer.state.status != TrainerStatus.RUNNING:
            raise ConfigurationError(
                f"the Trainer got a loader of {type(self).__name__} without the data module, which provides the "
                "policy and saves the environments: pass the data module, as in trainer.fit(model, datamodule=data)"
            )
        return make_batch()

    def teardown(self, stage: str) -> None:
        """Close the environments; their state is kept for a checkpoint that is saved later."""
        self._close()
        self._collected_version = None  # another model may have the same version

    def on_exception(self, exception: BaseException) -> None:
        try:
            self._close()
        except EnvironmentFailure as error:  # the exception itself is more important
            rank_zero_warn(str(error))

    def _close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None
        self._while_waiting = None
        with self._rank_named():
            try:
                self._sampler.close(keeps_state=not self.rollout_pending)
            finally:
                self._evaluator.close()

    def state_dict(self) -> dict[str, Any]:
        """Return seed, environments of all ranks (on rank 0 only) and options; a collective call."""
        return {"seed": self.seed, **self._sampler.state_dict(), "settings": self._settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the environments at the next rollout; a seed that was passed to the constructor is kept."""
        expected = f"a checkpoint with the state of RolloutDataModule: call super() in {type(self).__name__}.state_dict"
        check("seed" in state_dict, "ckpt_path", [*state_dict], expected)
        if not self._seed_given:
            self.seed = state_dict["seed"]
        if self.trainer is None or self.trainer.state.fn == "fit":  # evaluation must not change a later training
            self.check_resumable(state_dict)
            self._sampler.load_state_dict(state_dict)
            before = state_dict["settings"]
            for name, value in self._settings.items():
                if value != before.get(name, value):
                    rank_zero_info(f"Resuming with {name}={value!r} (before: {before[name]!r})")

    def check_resumable(self, state_dict: Mapping[str, Any]) -> None:
        """Raise a `ConfigurationError` if a state is of another environment."""
        stored, env_id = state_dict["settings"]["env_id"], self.spec.env_id
        if stored.rpartition(":")[2] != env_id.rpartition(":")[2]:  # the module that registers it may differ
            raise ConfigurationError(
                f"env_id={env_id!r} does not fit the checkpoint: expected {stored!r}, which it was trained in; use "
                "init_from to begin a new run with its parameters"
            )

    @property
    def _settings(self) -> dict[str, Any]:
        """Options by full name, without those that a checkpoint cannot hold."""
        spec = self.spec
        names = ("num_envs", "rollout_length", "rollouts_per_epoch", "info_keys", "seed", "actors", "evaluation")
        # Wrapper classes as class paths.
        env = replace(spec.env, wrappers=[*self.eval_spec.wrappers], training_wrappers=[*spec.training_wrappers])
        settings = {"env_id": spec.env_id, "backend": spec.backend, "env": env}
        settings |= {name: getattr(self, name) for name in names}
        plain = {}
        for name, value in flat(settings, default_groups(type(self))).items():
            with contextlib.suppress(ConfigurationError):
                plain[name] = to_plain_data(name, value)
        return plain

    # ------------------------------------------------------------------------------------------------------- collection

    def __str__(self) -> str:
        sizes = f"num_envs={self.num_envs}, rollout_length={self.rollout_length}"
        return f"{type(self).__name__}({self.spec.env_id!r}, {sizes}, backend={self.spec.backend!r})"

    def collect(self) -> Rollout:
        """Collect a rollout with the current policy, or receive one from an asynchronous actor."""
        with self._rank_named():
            rollout = self._collect()
        self._warn_of_missing_infos(rollout)
        self._warn_of_failures(rollout.failures or ())
        self._suggest_faster_settings(rollout)
        return rollout

    def _collect(self) -> Rollout:
        policy, version, dtype, device = self._policy()
        seed = self._fixed_seed()
        if self.actors.count:
            if self._source is None:
                self._source = self._start_actors(policy, version, seed)
            # While the learner waits there is no pending rollout: a checkpoint may be saved.
            rollout = self._source.next_rollout(self._while_waiting or (lambda: None))
            self._collected_version = version
            return rollout
        self._collected_version = version
        if not self._sampler.started:
            self._sampler.start(seed, self._rank, device, dtype)
        trainer = self._attached
        profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
        # The default profiler measures nothing, but costs a microsecond per call.
        profile = None if isinstance(profiler, PassThroughProfiler) else profiler.profile
        with profiler.profile("rollout"), trainer.precision_plugin.forward_context():
            return self._sampler.collect(policy, version, profile)

    def _start_actors(self, policy: Policy, version: int, seed: int) -> Actors:
        if self._sampler.restart_episodes():
            rank_zero_warn(
                f"actors.count={self.actors.count}: checkpoints do not contain the environments of actors, so they "
                "begin new episodes; weights, optimizers and counters are restored"
            )
        start = RayActors if self.actors.backend == "ray" else ProcessActors
        setup = ActorSetup(self._sampler, seed, self._rank)
        return start(self.actors, setup, cast(nn.Module, policy), version)

    def set_env_settings(self, attributes: Mapping[str, Any], reset_options: Mapping[str, Any] | None = None) -> None:
        """Change the training environments of this rank, in place of earlier changes; evaluation stays as it is.

        With `sync` and `async` each environment changes at the start of its next episode, with `native` and `torch` all
        change at once. Asynchronous actors change with the next rollout that the learner requests. Checkpoints have the
        settings of unfinished episodes only: set them again in `on_train_start` of a resumed run.

        Args:
            attributes: Attributes of the environment or of a wrapper, by name.
            reset_options: `options` of `reset` (`sync` and `async` only).

        Raises:
            ConfigurationError: An environment lacks an attribute, or the backend takes no reset options. A call
                before the first rollout does not raise, but the first rollout does.
        """
        self._sampler.set_env_settings((dict(attributes), dict(reset_options or {})))

    def call_while_waiting(self, function: Callable[[], None]) -> None:
        """Call a function in the main thread twice a second while the learner waits; its exception ends the wait."""
        self._while_waiting = function

    def publish_policy(self) -> None:
        """Send the current policy to asynchronous actors; the algorithm calls this after each update."""
        if self._source is not None:
            policy, version, _, _ = self._policy()
            self._source.publish(cast(nn.Module, policy), version)

    def _warn_of_missing_infos(self, rollout: Rollout) -> None:
        """Warn once about `info_keys` that were in no info until an episode or the first epoch ended."""
        if not self._missing_infos:
            return
        self._missing_infos -= {key for key, values in (rollout.infos or {}).items() if not values.isnan().all()}
        self._rollouts += 1
        if rollout.episodes.returns or self._rollouts == self.rollouts_per_epoch:
            # Gymnasium adds `_x`, which environments have the key `x`, and `final_...` at autoresets.
            known = [x for x in rollout.info_names if not x.startswith(("_", "final_", "lightning_rl/"))]
            for key in sorted(self._missing_infos):
                rank_zero_warn(
                    f"info_keys={key!r} did not appear in info before an episode or the first epoch ended "
                    f"(keys: {', '.join(known) or 'none'}){did_you_mean(key, known)}"
                )
            self._missing_infos.clear()

    def _warn_of_failures(self, failures: Sequence[str]) -> None:
        if failures and not self._warned_of_failure:
            self._warned_of_failure = True
            # Not `rank_zero_warn`: each rank has other environments.
            warnings.warn(
                f"{self._rank_prefix}{failures[0]}. It was replaced and begins a new episode, as will others that fail "
                "(env.on_failure='restart'); rollout/env_restarts counts them",
                stacklevel=2,
            )

    def _suggest_faster_settings(self, rollout: Rollout) -> None:
        """Log one hint if environments take most of the first minute after the first rollout."""
        seconds = rollout.parts_of_seconds.get("env")
        if self._suggested or seconds is None or rollout.actor is not None:
            return
        now = time.perf_counter()
        if self._timed_since is None:  # the first rollout includes the start of the environments
            self._timed_since = now
            return
        self._env_seconds += seconds
        elapsed = now - self._timed_since
        if elapsed < _SECONDS_BEFORE_HINT:
            return
        self._suggested = True
        if (share := self._env_seconds / elapsed) > 0.5:
            rank_zero_info(
                f"environments take {share:.0%} of the time (time/env_seconds), with backend={self.spec.backend!r} and "
                f"num_envs={self.num_envs}; try {_FASTER.get(self.spec.backend, _LARGER)}"
            )

    @contextlib.contextmanager
    def _rank_named(self) -> Iterator[None]:
        try:
            yield
        except EnvironmentFailure as error:
            error.args = (f"{self._rank_prefix}{error}",)
            raise

    @property
    def _attached(self) -> Trainer:
        if self.trainer is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no Trainer, which provides the policy: pass the data module, as in "
                "trainer.fit(model, datamodule=data)"
            )
        return self.trainer

    @property
    def _rank_prefix(self) -> str:
        return f"rank {self._rank}: " if self.trainer is not None and self.trainer.world_size > 1 else ""

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _seed(self) -> int:
        return torch.initial_seed() % 2**63 if self.seed is None else self.seed

    def _fixed_seed(self) -> int:
        """Return the seed of the run, by default PyTorch's on rank 0; the first call is a collective call."""
        if self.seed is None:  # a checkpoint has one seed for all ranks
            self.seed = gather_ranks(self._seed)[0]
        return self.seed

    def _policy(self) -> tuple[Policy, int, torch.dtype, torch.device]:
        """Return policy, version, dtype and device of the model, which collection needs."""
        module: Any = self._attached.lightning_module
        policy: Any = module.acting_policy() if hasattr(module, "acting_policy") else module.policy
        parameter = next(policy.parameters())
        return policy, int(getattr(module, "policy_version", 0)), parameter.dtype, parameter.device

    # ------------------------------------------------------------------------------------------------------- evaluation

    def run_episodes(self, role: int = EVALUATION, record: bool = False) -> list[Episode]:
        """Play this rank's share of the evaluation episodes with the current policy.

        `role` selects the seeds, `EVALUATION` or `TESTING`; `record` keeps observations, actions and rewards.
        """
        ranks = self._attached.world_size
        shares = [len(range(rank, self.evaluation.episodes, ranks)) for rank in range(ranks)]
        first = sum(shares[: self._rank])
        numbers, most = range(first, first + shares[self._rank]), self.evaluation.num_envs
        options: dict[str, Any] = {"max_envs": most, "record": record, "info_keys": self.info_keys}
        return self._run_episodes(self._evaluator, numbers, role, **options)

    def _run_episodes(self, evaluator: Evaluator, numbers: range, role: int, **options: Any) -> list[Episode]:
        policy, _, dtype, device = self._policy()
        path = self._seed, role, self._rank
        options |= {"dtype": dtype, "deterministic": self.evaluation.deterministic}
        with self._rank_named(), self._attached.precision_plugin.forward_context():
            episodes = evaluator.run_episodes(policy, numbers, path, device, self.num_agents, **options)
        if evaluator.environments is not None:
            self._warn_of_failures(evaluator.environments.pop_failures())
        return episodes

    def check_filmable(self, env_kwargs: dict[str, Any] | None = None) -> None:
        """Render one frame of an environment with `env_kwargs` for its constructor, or raise a `ConfigurationError`."""
        spec = self.eval_spec.for_filming(env_kwargs)
        with contextlib.closing(make_environments(spec, 1, [0])) as environments:
            pool: Any = environments.env.unwrapped
            pool.call("check_renders")
        found, own = (environments.single_observation_space, environments.single_action_space), self._spaces[:2]
        expected = f"{own}, as without filming; backend='native' films single environments"
        check(found == own, f"env_id={spec.env_id!r}: spaces", found, expected)

    def film(self, films: FilmMaker, num_episodes: int, env_kwargs: dict[str, Any] | None = None) -> list[Episode]:
        """Play and film episodes with the current policy: the same episodes each time, with separate seeds.

        `films` receives the frames of each episode, numbered from 0; for `env_kwargs` see `check_filmable`.
        """
        with contextlib.closing(Evaluator(self.eval_spec.for_filming(env_kwargs), films)) as evaluator:
            return self._run_episodes(evaluator, range(num_episodes), FILMING)

    def film_predictions(self, films: FilmMaker | None, env_kwargs: dict[str, Any] | None = None) -> None:
        """Film the same evaluation episodes from now on, numbered over all ranks; None stops filming."""
        self._evaluator.close()
        spec = self.eval_spec if films is None else self.eval_spec.for_filming(env_kwargs)
        self._evaluator = Evaluator(spec, films)


def options_of_run(
    cls: type[RolloutDataModule], settings: Mapping[str, Any], given: Mapping[str, Any], field: str
) -> dict[str, Any]:
    """Return the options of a run from the `settings` of its state, without the seed, which is stored separately.

    An option that a checkpoint cannot hold, such as a function in `env.kwargs`, raises an error that begins with
    `field`, unless it is in `given`.
    """
    groups = default_groups(cls)
    missing = flat(defaults_of(cls), groups).keys() - settings.keys() - given.keys()
    for name in groups.keys() & given.keys():
        group = given[name]
        missing -= {f"{name}.{option}" for option in (group if isinstance(group, Mapping) else vars(groups[name]))}
    if settings and missing:
        raise ConfigurationError(
            f"{field}: the checkpoint cannot hold {', '.join(sorted(missing))}: pass the value of the run"
        )
    return nested({name: value for name, value in settings.items() if name != "seed"})
