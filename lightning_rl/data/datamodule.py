"""The Lightning data modules that collect rollouts and play episodes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any, Generic, Self, TypeVar, cast

import torch
from gymnasium import spaces
from lightning.pytorch import LightningDataModule
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn  # type: ignore[attr-defined]
from torch import nn

from lightning_rl.data.actors import (
    ActorBackend,
    ActorOptions,
    ActorSetup,
    BoundedLag,
    ProcessActors,
    RayActors,
    RolloutSource,
    StartMethod,
)
from lightning_rl.data.collector import Sampler
from lightning_rl.data.evaluation import Evaluator
from lightning_rl.environments import (
    AtariPreprocessing,
    Backend,
    EnvironmentFailure,
    EnvironmentSpec,
    FilmMaker,
    OnEnvFailure,
    RewardClip,
    WrapperOptions,
    check_filmable,
    spaces_of,
)
from lightning_rl.environments.seeding import EVALUATION, FILMING, TESTING
from lightning_rl.files import read_data
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.policies.interface import Policy
from lightning_rl.rollouts.episode import Episode
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import (
    ClassSpec,
    ConfigurationError,
    check,
    check_bool,
    check_names,
    check_positive_int,
    constructor_options,
    did_you_mean,
    is_int,
    loading,
    to_class_specs,
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
        eval_episodes: Number of episodes, over all ranks.
        num_eval_envs: Number of environments on each rank; None: as many as it has episodes to play, 8 at the most.
        eval_deterministic: Play the mode of the policy rather than samples from it.
        seed: Root of all seeds; None takes the one given to `seed_everything`.

    Raises:
        ConfigurationError: An option is out of range.
    """

    def __init__(
        self,
        eval_spec: EnvironmentSpec,
        eval_episodes: int,
        num_eval_envs: int | None,
        eval_deterministic: bool,
        seed: int | None,
    ) -> None:
        super().__init__()
        check_positive_int("eval_episodes", eval_episodes)
        if num_eval_envs is not None:
            check_positive_int("num_eval_envs", num_eval_envs)
        check_bool("eval_deterministic", eval_deterministic)
        self.eval_spec = eval_spec
        self.eval_episodes = eval_episodes
        self.num_eval_envs = num_eval_envs
        self.eval_deterministic = eval_deterministic
        self.seed = seed
        self._evaluator = Evaluator(eval_spec, num_eval_envs)
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
        shares = [
            len(range(rank, self.eval_episodes, self.trainer.world_size)) for rank in range(self.trainer.world_size)
        ]
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
        self._filming = None if films is None else (Evaluator(spec, self.num_eval_envs), films)

    def _run_episodes(self, evaluator: Evaluator, num_episodes: int, role: int, **options: Any) -> list[Episode]:  # noqa: ANN401
        assert self.trainer is not None
        policy, _, dtype, device = self._policy()
        seed = self.seed if self.seed is not None else torch.initial_seed() % 2**63
        options = {"record": False, "deterministic": self.eval_deterministic} | options
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
                "fail (on_env_failure='restart'); rollout/env_restarts counts them",
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
    validation, test or prediction is one set of `eval_episodes` whole episodes, played in environments of their own
    with their own seeds, raw rewards and frozen normalisers: the same episodes each time.

    Args:
        env_id: A Gymnasium id (`package:id` imports the package first), or an EnvPool task.
        num_envs: Number of training environments on each rank.
        rollout_length: Steps of each environment in a rollout.
        rollouts_per_epoch: Rollouts in an epoch: how often the Trainer validates and checkpoints by default.
        backend: `sync` steps the environments one after another in this process, `async` has a worker process for each,
            `native` is the environment's own vectorised version, `torch` one that speaks tensors, and `envpool` that
            of EnvPool.
        env_kwargs: Arguments of the environment's constructor.
        wrappers: `gymnasium.Wrapper` classes (`gymnasium.vector.VectorWrapper` for `native`, `torch` and `envpool`) as
            class paths or `{"class_path": ..., "init_args": ...}`, applied in this order in training and evaluation.
        training_wrappers: More wrappers, in training only: those that change rewards or end episodes early.
        atari: Options of the preprocessing of Atari games; other environments ignore its default and refuse any other.
        step_timeout: Seconds a worker process may take for one step or reset before it counts as hung (`async` only);
            None: 120.
        on_env_failure: What becomes of a run in which an environment raises, returns NaN, infinity, a wrong shape or a
            reward that is not a number, or whose worker process dies or hangs: `raise` ends it with an error that names
            environment, episode, seed and step; `restart` (`sync` and `async` only) makes the environment anew, which
            goes on with its next episode. The episode that was cut off counts as truncated, the step that failed is
            not learned from, `rollout/env_restarts` counts. Four failures without a step in between end the run.
        imports: Modules to import before the id is looked up, in worker processes too: those that register
            environments.
        max_episode_steps: Truncate episodes after this many steps of the environment, in the place of the limit that it
            is registered with.
        action_repeat: Steps of the environment for each action: rewards are added up, and the end of an episode ends
            the repetition (`sync` and `async` only; Atari games have `atari.frame_skip`).
        learned_action_repeat: Let the policy choose for each action how often it is taken, up to this many times:
            actions become a `Dict` of `action` and `repeat`, rewards are added up, and what follows is discounted by γ
            for each time (`sync` and `async` only). `{"max": n, "gamma": γ}` discounts rewards within a step by γ too,
            in training. None takes each action once.
        reward_scale: Factor of the rewards that are learned from; evaluation has raw ones.
        reward_clip: What bounds them after that: `abs_one` to [-1, 1], a number c to [-c, c], `soft_asymmetric` with
            5 · tanh(r / 5), times 0.3 where r is negative.
        frame_stack: Observations are those of this many steps, oldest first, an episode beginning with copies of its
            first: along a new first dimension, images along their channels. None does not stack.
        flatten_observations: Make one vector of each observation, nested or not; what is discrete becomes one-hot.
        previous_action: Add the previous action to observations, which become a `Dict` (`observation`,
            `previous_action`) where they are none; what is discrete is one-hot; zeros where an episode begins.
        previous_reward: Add the previous reward, as it is learned from, in evaluation too.
        action_mask: Where the environment says which actions are valid: `info.<key>`, `observation.<path>` or
            `method.<name>` (without arguments); None: all are. Masks become a part of the observation, which the policy
            draws its actions by, in training and evaluation. See the guide for their shapes.
        num_actors: Asynchronous actors on each rank: processes with `num_envs` environments and a copy of the policy
            each, which collect while the learner learns, so that rollouts are of earlier versions of the policy. For
            algorithms that correct for that. 0: none, everything is collected in step and can be reproduced.
        actor_prefetch: Rollouts that each of them may have ready or under way before the learner takes them; None: 2
            of several processes, so that none waits while the learner is at a rollout of another's, and 1 of others.
        actor_start_method: How their processes are started: `fork`, `spawn` or `forkserver`; None: as Python does.
        actor_timeout: Seconds that an actor may take for a rollout, its start included, before it counts as hung.
        max_policy_lag: Versions of the policy that a rollout may be behind the learner's; older ones are dropped, and
            counted as `rollout/dropped`. None: any number.
        actor_backend: What actors are: `processes` of this machine, or `ray`: actors of Ray, on any machine of its
            cluster, which join when there is room for them and are replaced when they die (counted as
            `rollout/actors_lost`).
        actor_resources: What Ray sets aside for each of them, by its names: `{CPU: 1}`, which None is too. Networks
            have as many threads as CPUs.
        ray_address: Of Ray's cluster, as `ray.init` has it; None joins the one that it finds, or starts one on this
            machine. A session that is connected already is used as it is.
        eval_episodes: Number of evaluation episodes, over all ranks.
        num_eval_envs: Number of evaluation environments on each rank; None: as many as it has episodes to play, 8 at
            the most.
        eval_deterministic: Evaluate the mode of the policy rather than samples from it.
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
        env_kwargs: dict[str, Any] | None = None,
        wrappers: list[str | ClassSpec] | None = None,
        training_wrappers: list[str | ClassSpec] | None = None,
        atari: AtariPreprocessing | None = None,
        step_timeout: float | None = None,
        on_env_failure: OnEnvFailure = "raise",
        imports: Sequence[str] = (),
        max_episode_steps: int | None = None,
        action_repeat: int = 1,
        learned_action_repeat: int | dict[str, float] | None = None,
        reward_scale: float = 1.0,
        reward_clip: RewardClip | None = None,
        frame_stack: int | None = None,
        flatten_observations: bool = False,
        previous_action: bool = False,
        previous_reward: bool = False,
        action_mask: str | None = None,
        num_actors: int = 0,
        actor_prefetch: int | None = None,
        actor_start_method: StartMethod | None = None,
        actor_timeout: float = 300.0,
        max_policy_lag: int | None = None,
        actor_backend: ActorBackend = "processes",
        actor_resources: dict[str, float] | None = None,
        ray_address: str | None = None,
        eval_episodes: int = 10,
        num_eval_envs: int | None = None,
        eval_deterministic: bool = True,
        info_keys: Sequence[str] = (),
        seed: int | None = None,
    ) -> None:
        check(isinstance(env_id, str), "env_id", env_id, "an id: register an environment of your own first")
        for name in ("num_envs", "rollout_length", "rollouts_per_epoch"):
            check_positive_int(name, locals()[name])
        check(seed is None or (is_int(seed) and seed >= 0), "seed", seed, "an integer of at least 0, or None")
        check_names("info_keys", info_keys, "a list of keys")
        check_names("imports", imports, "a list of modules")
        always = to_class_specs("wrappers", wrappers)
        only_training = to_class_specs("training_wrappers", training_wrappers)
        options = WrapperOptions(
            max_episode_steps=max_episode_steps,
            action_repeat=action_repeat,
            learned_action_repeat=learned_action_repeat,
            reward_scale=reward_scale,
            reward_clip=reward_clip,
            frame_stack=frame_stack,
            flatten_observations=flatten_observations,
            previous_action=previous_action,
            previous_reward=previous_reward,
            action_mask=action_mask,
        )
        spec = EnvironmentSpec(
            env_id,
            {} if env_kwargs is None else env_kwargs,
            (*always, *only_training),
            backend,
            atari,
            step_timeout,
            on_env_failure,
            options=options,
            imports=tuple(imports),
        )
        super().__init__(spec.for_evaluation(always), eval_episodes, num_eval_envs, eval_deterministic, seed)
        self.spec = spec
        self.actors = ActorOptions(
            num_actors,
            actor_prefetch,
            actor_start_method,
            actor_timeout,
            max_policy_lag,
            actor_backend,
            actor_resources,
            ray_address,
        )
        self.actors.check_environments(self.spec)
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
            if self.spec.wrappers != self.eval_spec.wrappers and (other := spaces_of(self.eval_spec)) != found:
                names = [wrapper["class_path"] for wrapper in self.spec.wrappers[len(self.eval_spec.wrappers) :]]
                raise ConfigurationError(
                    f"training_wrappers={names} change the spaces from {other} to {found}: expected such as leave them "
                    "alone; those that do not belong into wrappers"
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
        own = {n: getattr(self, n) for n in ("num_envs", "rollout_length", "rollouts_per_epoch", "seed", "num_actors")}
        of_environments = {n: getattr(self.spec, n) for n in ("env_id", "backend", "env_kwargs", "wrappers")}
        return plain_parts(of_environments | own | asdict(self.spec.options))

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
        if self.num_actors:
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
                f"num_actors={self.num_actors}: where the environments of actors are is not in checkpoints, so they "
                "begin new episodes; weights, optimisers and counters go on from where they were"
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
