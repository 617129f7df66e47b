"""The Lightning data modules that collect rollouts and play episodes."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any, Generic, Self, TypeVar, cast

import torch
from gymnasium import spaces
from lightning.pytorch import LightningDataModule
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn  # type: ignore[attr-defined]
from torch import nn

from lightning_rl.data.actors import (
    ActorConfig,
    ActorOptions,
    ActorSetup,
    BoundedLag,
    ProcessActors,
    RayActors,
    RolloutSource,
)
from lightning_rl.data.collector import Sampler
from lightning_rl.data.evaluation import EvaluationConfig, EvaluationOptions, Evaluator
from lightning_rl.environments import (
    Backend,
    EnvConfig,
    EnvironmentFailure,
    EnvironmentSpec,
    EnvOptions,
    FilmMaker,
    check_filmable,
    spaces_of,
)
from lightning_rl.environments.seeding import EVALUATION, FILMING, TESTING
from lightning_rl.files import read_data
from lightning_rl.options import changed, default_groups, flat
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.policies.interface import Policy
from lightning_rl.rollouts.episode import Episode
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import (
    ConfigurationError,
    check,
    check_names,
    check_positive_int,
    constructor_options,
    did_you_mean,
    is_int,
    loading,
    to_plain_data,
)

T = TypeVar("T")


class OnDemandLoader(Generic[T]):
    """A loader that makes each batch at the moment when the Trainer asks for it.

    It has a length because Lightning fetches one batch ahead from a loader that has none: each rollout would be
    collected with the parameters from before the last update.

    Args:
        make_batch: Called for each batch.
        length: Number of batches.
    """

    def __init__(self, make_batch: Callable[[], T], length: int) -> None:
        self.make_batch = make_batch
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[T]:
        for _ in range(self.length):
            yield self.make_batch()


class EpisodesDataModule(LightningDataModule):
    """One batch of validation, test or prediction is one set of episodes, in environments made for nothing else.

    Args:
        eval_spec: Of one environment.
        evaluation: Options of the episodes.
        seed: Root of all seeds; None takes the one given to `seed_everything`.

    Raises:
        ConfigurationError: An option is out of range.
    """

    def __init__(
        self,
        eval_spec: EnvironmentSpec,
        evaluation: EvaluationConfig,
        seed: int | None,
    ) -> None:
        super().__init__()
        evaluation.check()
        self.eval_spec = eval_spec
        self.evaluation = evaluation
        self.seed = seed
        self._evaluator = Evaluator(eval_spec, evaluation.num_envs)
        self._filming: tuple[Evaluator, FilmMaker] | None = None
        self._warned_of_failure = False

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,  # noqa: ANN401 - as torch.load has it
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        trust: Sequence[str] = (),
        **kwargs: Any,  # noqa: ANN401 - options
    ) -> Self:
        """Return the data in a checkpoint, as Lightning does; see `OnPolicyAlgorithm.load_from_checkpoint`.

        The checkpoint has the state of the environments and no options, unless a subclass saves its hyper-parameters.
        """
        check(hparams_file is None, "hparams_file", hparams_file, "None; give the options themselves")
        checkpoint = read_data(checkpoint_path, map_location, weights_only)
        with loading(trust):
            stored = constructor_options(cls, checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}))
            data = cls(**stored | kwargs)
        if cls.__qualname__ in checkpoint:
            data.load_state_dict(checkpoint[cls.__qualname__])
        return data

    def save_hyperparameters(
        self,
        *args: Any,  # noqa: ANN401 - as Lightning has it
        ignore: Sequence[str] | str | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the options of a subclass that calls this, as Lightning does; groups as dicts, for checkpoints."""
        caller = inspect.currentframe()
        frame = frame or (None if caller is None else caller.f_back)
        super().save_hyperparameters(*args, ignore=ignore, frame=frame, logger=logger)
        for name, value in self.hparams.items():
            self.hparams[name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

    def _probe(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Return observation and action space of one environment."""
        return spaces_of(self.eval_spec)

    def close_evaluation(self) -> None:
        """Close the environments."""
        self._evaluator.close()
        if self._filming is not None:
            self._filming[0].close()

    def val_dataloader(self) -> OnDemandLoader[list[Episode]]:
        """Return the loader of one set of evaluation episodes."""
        return self._loader(self.run_episodes, 1)

    def test_dataloader(self) -> OnDemandLoader[list[Episode]]:
        """Return the loader of one set of evaluation episodes, other ones than those that validation selects by."""
        return self._loader(partial(self.run_episodes, role=TESTING), 1)

    def predict_dataloader(self) -> OnDemandLoader[list[Episode]]:
        """Return the loader of one set of evaluation episodes with their observations, actions and rewards."""
        return self._loader(partial(self.run_episodes, role=TESTING, record=True), 1)

    def _loader(self, make_batch: Callable[[], T], length: int) -> OnDemandLoader[T]:
        """Return a loader that refuses a Trainer without this data module.

        Such a Trainer neither attaches the policy nor saves where the environments are.
        """

        def make_for_trainer() -> T:
            if self.trainer is None or self.trainer.state.status != TrainerStatus.RUNNING:
                raise ConfigurationError(
                    f"the Trainer got a loader of {type(self).__name__} without the data module, which gives the "
                    "loader its policy: pass the data module itself, as in trainer.fit(model, datamodule=data)"
                )
            return make_batch()

        return OnDemandLoader(make_for_trainer, length)

    def run_episodes(self, role: int = EVALUATION, record: bool = False) -> list[Episode]:
        """Play this rank's share of the evaluation episodes with the current policy.

        Args:
            role: Branch of the tree of seeds; validation and test play different episodes.
            record: Keep observations, actions and rewards.
        """
        assert self.trainer is not None
        evaluator, films = self._filming if record and self._filming is not None else (self._evaluator, None)
        ranks = self.trainer.world_size
        shares = [len(range(rank, self.evaluation.episodes, ranks)) for rank in range(ranks)]
        first = sum(shares[: self._rank])
        return self._run_episodes(evaluator, shares[self._rank], role, record=record, films=films, first_number=first)

    def check_filmable(self, env_kwargs: dict[str, Any] | None = None) -> None:
        """Take one picture of an environment.

        Args:
            env_kwargs: More arguments of its constructor: the size of the picture, a camera of the simulation.

        Raises:
            ConfigurationError: Its backend has no pictures, or they cannot be made on this machine.
        """
        spec = self.eval_spec.for_filming(env_kwargs)
        check_filmable(spec)
        if self.eval_spec.backend == "native" and (found := spaces_of(spec)) != self._probe():
            raise ConfigurationError(
                f"backend='native': single environments of {spec.env_id}, which are filmed, have other spaces: "
                f"expected {self._probe()}, found {found}"
            )

    def film(self, films: FilmMaker, num_episodes: int, env_kwargs: dict[str, Any] | None = None) -> list[Episode]:
        """Play episodes with the current policy, and film them: the same ones each time, unlike those of evaluation.

        Args:
            films: Takes the frames of each episode, numbered from 0.
            num_episodes: How many, on this rank.
            env_kwargs: As in `check_filmable`.
        """
        evaluator = Evaluator(self.eval_spec.for_filming(env_kwargs), None)
        try:
            return self._run_episodes(evaluator, num_episodes, FILMING, films=films)
        finally:
            evaluator.close()

    def film_predictions(self, films: FilmMaker | None, env_kwargs: dict[str, Any] | None = None) -> None:
        """Film the episodes of `predict` from now on, in which nothing else changes.

        Args:
            films: Takes the frames of each episode, numbered from 0 over all ranks; None: film no more.
            env_kwargs: As in `check_filmable`.
        """
        if self._filming is not None:
            self._filming[0].close()
        spec = self.eval_spec if films is None else self.eval_spec.for_filming(env_kwargs)
        self._filming = None if films is None else (Evaluator(spec, self.evaluation.num_envs), films)

    def _run_episodes(self, evaluator: Evaluator, num_episodes: int, role: int, **options: Any) -> list[Episode]:  # noqa: ANN401
        assert self.trainer is not None
        policy, _, dtype, device = self._policy()
        seed = self.seed if self.seed is not None else torch.initial_seed() % 2**63
        options = {"record": False, "deterministic": self.evaluation.deterministic} | options
        with self._rank_named(), self.trainer.precision_plugin.forward_context():
            path = (seed, role, self._rank)
            episodes = evaluator.run_episodes(policy, self._probe(), num_episodes, path, device, dtype, **options)
        if evaluator.environments is not None:
            self._report_failures(evaluator.environments.pop_failures())
        return episodes

    def _report_failures(self, failures: Sequence[str] | None) -> None:
        """Tell of the first environment that was replaced."""
        if failures and not self._warned_of_failure:
            self._warned_of_failure = True
            # Not `rank_zero_warn`: each rank has environments of its own.
            warnings.warn(
                f"{self._rank_prefix}{failures[0]}. It was made anew and begins a new episode, as will others that "
                "fail (env.on_failure='restart'); rollout/env_restarts counts them",
                stacklevel=2,
            )

    @contextlib.contextmanager
    def _rank_named(self) -> Iterator[None]:
        """Name this rank, where there are several, in the failure of one of its environments."""
        try:
            yield
        except EnvironmentFailure as error:
            error.args = (f"{self._rank_prefix}{error}",)
            raise

    @property
    def _rank_prefix(self) -> str:
        several = self.trainer is not None and self.trainer.world_size > 1
        return f"rank {self._rank}: " if several else ""

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    def _policy(self) -> tuple[Policy, int, torch.dtype, torch.device]:
        """Take policy, its version, dtype and device from the module that is being trained or evaluated.

        The only place where the data side knows of the model side.
        """
        assert self.trainer is not None
        module = self.trainer.lightning_module
        policy: Any = module.policy
        device = module.device
        if device.type == "xla":  # which runs whole graphs: one for each step of the environments would be slower
            policy, device = copy_to_cpu(policy), torch.device("cpu")
        return policy, int(getattr(module, "policy_version", 0)), next(policy.parameters()).dtype, device


_EFFECTS = {
    "num_envs": "; environments that there were before go on from where they were",
    "seed": ", of evaluation and of further environments; others go on with the seeds they had",
}


def plain_parts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the settings that a checkpoint can hold."""
    plain = {}
    for name, value in settings.items():
        with contextlib.suppress(ConfigurationError):
            plain[name] = to_plain_data(name, value)
    return plain


def check_same_environment(before: Mapping[str, Any], env_id: str) -> None:
    """Raise unless a run in an environment goes on from settings that name the same one, wherever it is registered.

    Raises:
        ConfigurationError: They name another one.
    """
    stored = before["env_id"]
    if stored.rpartition(":")[2] != env_id.rpartition(":")[2]:
        raise ConfigurationError(
            f"env_id={env_id!r} does not fit the checkpoint: expected {stored!r}, which it was trained in; init_from "
            "begins a new run with its parameters"
        )


def say_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Say which settings are not those of the checkpoint; one that it does not know is passed over."""
    for name, value in now.items():
        if value != before.get(name, value):
            rank_zero_info(f"Resuming with {name}={value!r} (before: {before[name]!r}){_EFFECTS.get(name, '')}")


class RolloutDataModule(EpisodesDataModule):
    """Owns the environments and yields on-policy batches.

    One training batch is one `Rollout` of `rollout_length` steps in each of `num_envs` environments, collected when the
    Trainer asks for it with the parameters of that moment; an epoch is `rollouts_per_epoch` of them. One batch of
    validation, test or prediction is one set of `evaluation.episodes` whole episodes, played in environments of their
    own with their own seeds, raw rewards and frozen normalisers: the same episodes each time.

    Args:
        env_id: A Gymnasium id (`package:id` imports the package first), or an EnvPool task.
        num_envs: Number of training environments on each rank.
        rollout_length: Steps of each environment in a rollout.
        rollouts_per_epoch: Rollouts in an epoch: how often the Trainer validates and checkpoints by default.
        backend: `sync` steps the environments one after another in this process, `async` has a worker process for each,
            `native` is the environment's own vectorised version, `torch` one that speaks tensors, and `envpool` that
            of EnvPool.
        env: Options of the environments; a dict changes single fields of the default. So with the two below.
        actors: Options of asynchronous actors.
        evaluation: Options of validation, test and prediction.
        info_keys: Keys of `info` whose scalars are averaged and logged as `rollout/<key>`.
        seed: Root of all seeds; None takes the one given to `seed_everything`, or a random one.

    Raises:
        ConfigurationError: An option is out of range, or the environment cannot be made.
    """

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
    ) -> None:
        check(isinstance(env_id, str), "env_id", env_id, "an id: register an environment of your own first")
        for name in ("num_envs", "rollout_length", "rollouts_per_epoch"):
            check_positive_int(name, locals()[name])
        check(seed is None or (is_int(seed) and seed >= 0), "seed", seed, "an integer of at least 0, or None")
        check_names("info_keys", info_keys, "a list of keys")
        groups = default_groups(type(self))
        spec = EnvironmentSpec(env_id, changed("env", groups["env"], env), backend)
        super().__init__(spec.for_evaluation(), changed("evaluation", groups["evaluation"], evaluation), seed)
        self.spec = spec
        self.actors: ActorConfig = changed("actors", groups["actors"], actors)
        self.actors.check(backend)
        self.num_envs = num_envs
        self.rollout_length = rollout_length
        self.rollouts_per_epoch = rollouts_per_epoch
        self.info_keys = list(info_keys)
        self._spaces: tuple[spaces.Space[Any], spaces.Space[Any]] | None = None
        self._sampler = Sampler(self.spec, num_envs, rollout_length, self.info_keys)
        self._source: BoundedLag | None = None
        self._seed_given = seed is not None
        self._missing_infos: set[str] | None = set(self.info_keys) or None
        self._rollouts = 0
        self._collected_version: int | None = None
        self._while_waiting: Callable[[], None] = _nothing

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """Observation space of one environment, wrappers included."""
        return self._probe()[0]

    @property
    def action_space(self) -> spaces.Space[Any]:
        """Action space of one environment."""
        return self._probe()[1]

    @property
    def rollout_shape(self) -> tuple[int, int]:
        """`(T, B)`: steps and environments of one rank's rollout."""
        return self.rollout_length, self.num_envs

    @property
    def num_actors(self) -> int:
        """Asynchronous actors on each rank; 0 where the learner collects in step."""
        return self.actors.count

    @property
    def rollout_pending(self) -> bool:
        """Whether a rollout was begun that the module has not learned from yet."""
        module = self.trainer.lightning_module if self.trainer is not None else None
        version = getattr(module, "policy_version", None)
        return version is not None and version == self._collected_version

    def _probe(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Make one environment, once, to learn the spaces."""
        if self._spaces is None:
            found = spaces_of(self.spec)
            names = [wrapper["class_path"] for wrapper in self.spec.training_wrappers]
            if names and (other := spaces_of(self.eval_spec)) != found:
                raise ConfigurationError(
                    f"env.training_wrappers={names} change the spaces from {other} to {found}: expected such as leave "
                    "them alone; those that do not belong into env.wrappers"
                )
            self._spaces = found
        return self._spaces

    def teardown(self, stage: str) -> None:
        """Close the environments; where the run ended well, remember for a later checkpoint where they were."""
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """Close the environments when the Trainer fails or is interrupted."""
        try:
            self._close()
        except EnvironmentFailure as error:  # what ended the run says more
            rank_zero_warn(str(error))

    def _close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None
        self._while_waiting = _nothing
        self._sampler.store_state(in_between=not self.rollout_pending)
        with self._rank_named():
            try:
                self._sampler.close()
            finally:
                self.close_evaluation()

    def train_dataloader(self) -> OnDemandLoader[Rollout]:
        """Return the loader of rollouts."""
        self._collected_version = None  # what an earlier fit left undone, this one does not go on from
        return self._loader(self.collect, self.rollouts_per_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on from, of all ranks on rank 0 alone; a collective call."""
        return {"seed": self.seed, **self._sampler.state_dict(), "settings": self._settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of an earlier run, at the next rollout; a seed that was given stays as it is."""
        if not self._seed_given:
            self.seed = state_dict["seed"]  # which is then no change
        if self.trainer is None or self.trainer.state.fn == "fit":  # evaluation leaves a later training alone
            self.check_resumable(state_dict)
            self._sampler.load_state_dict(state_dict)
            say_changes(state_dict["settings"], self._settings)

    def check_resumable(self, state_dict: Mapping[str, Any]) -> None:
        """Raise unless a run of these environments can go on from such a state.

        Raises:
            ConfigurationError: It is of another environment.
        """
        check_same_environment(state_dict["settings"], self.spec.env_id)

    @property
    def _settings(self) -> dict[str, Any]:
        """What a resumed run may have changed, as far as it is plain data."""
        spec, names = self.spec, ("num_envs", "rollout_length", "rollouts_per_epoch", "seed", "actors", "evaluation")
        # Classes are named by their paths.
        env = replace(spec.env, wrappers=[*self.eval_spec.wrappers], training_wrappers=[*spec.training_wrappers])
        settings = {"env_id": spec.env_id, "backend": spec.backend, "env": env}
        settings |= {name: getattr(self, name) for name in names}
        return plain_parts(flat(settings, default_groups(type(self))))

    def collect(self) -> Rollout:
        """Collect one rollout with the current policy, or take one that actors have collected with an earlier one."""
        with self._rank_named():
            rollout = self._collect()
        self._look_for_infos(rollout)
        self._report_failures(rollout.failures)
        return rollout

    def _collect(self) -> Rollout:
        policy, version, dtype, device = self._policy()
        if self.seed is None:
            self.seed = torch.initial_seed() % 2**63
        if self.actors.count:
            if self._source is None:
                self._source = self._start_actors(policy, version, self.seed)
            # Until it arrives a checkpoint may be saved: all that the learner has, it has learned from.
            rollout = self._source.next_rollout(self._while_waiting)
            self._collected_version = version
        else:
            self._collected_version = version
            if not self._sampler.started:
                self._sampler.start(self._probe(), self.seed, self._rank, device, dtype)
            assert self.trainer is not None
            profiler: Profiler = self.trainer.profiler  # type: ignore[attr-defined]
            # One that measures nothing would still cost a microsecond in every step.
            profile = None if isinstance(profiler, PassThroughProfiler) else profiler.profile
            with profiler.profile("rollout"), self.trainer.precision_plugin.forward_context():
                rollout = self._sampler.collect(policy, version, profile)
        return rollout

    def _start_actors(self, policy: Policy, version: int, seed: int) -> BoundedLag:
        if self._sampler.restart_episodes():
            rank_zero_warn(
                f"actors.count={self.actors.count}: where the environments of actors are is not in checkpoints, so "
                "they begin new episodes; weights, optimisers and counters go on from where they were"
            )
        setup = ActorSetup(
            self.spec,
            self.num_envs,
            self.rollout_length,
            tuple(self.info_keys),
            self._probe(),
            seed,
            self._rank,
            self._sampler.starts,
        )
        start: Callable[..., RolloutSource] = RayActors if self.actors.backend == "ray" else ProcessActors
        source = start(self.actors, setup, cast(nn.Module, policy), version)
        return BoundedLag(source, self.actors.max_policy_lag, version)

    def call_while_waiting(self, function: Callable[[], None]) -> None:
        """Call a function about twice a second while no actor delivers a rollout; what it raises ends the wait.

        Args:
            function: Called in the main thread until the environments are closed, at the end of a run.
        """
        self._while_waiting = function

    def publish_policy(self) -> None:
        """Let asynchronous actors act with the policy as it is now; the algorithm calls it after each update."""
        if self._source is not None:
            policy, version, _, _ = self._policy()
            self._source.publish(cast(nn.Module, policy), version)

    def _look_for_infos(self, rollout: Rollout) -> None:
        """Warn once if no `info` had one of the keys that are to be logged, up to an episode's or the epoch's end."""
        if self._missing_infos is None:
            return
        self._missing_infos -= {key for key, values in rollout.infos.items() if values}
        self._rollouts += 1
        if rollout.episodes.returns or self._rollouts == self.rollouts_per_epoch:
            first = "rollout" if self._rollouts == 1 else f"{self._rollouts} rollouts"
            # Gymnasium's own: of `x` which environments told it, and what belongs to the autoreset.
            known = [x for x in rollout.info_names if not x.startswith(("_", "final_", "lightning_rl/"))]
            for key in sorted(self._missing_infos):
                rank_zero_warn(
                    f"info_keys={key!r} was in no info of the first {first}, which had "
                    f"{', '.join(known) or 'no keys'}{did_you_mean(key, known)}"
                )
            self._missing_infos = None


def _nothing() -> None:
    """Do nothing while the learner waits."""
