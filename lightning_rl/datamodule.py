"""The data side: environments, and loaders that yield on-policy rollouts and evaluation episodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
from gymnasium import spaces
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn  # type: ignore[attr-defined]
from torch import nn

from lightning_rl.actors import (
    ActorBackend,
    ActorOptions,
    ActorSetup,
    BoundedLag,
    ProcessActors,
    RayActors,
    RolloutSource,
    StartMethod,
)
from lightning_rl.environments import (
    AtariPreprocessing,
    Backend,
    EnvironmentFailure,
    EnvironmentSpec,
    OnEnvFailure,
    RewardClip,
    WrapperOptions,
    spaces_of,
)
from lightning_rl.environments.bottleneck import BottleneckWatch
from lightning_rl.episodes_datamodule import EpisodesDataModule
from lightning_rl.loaders import OnDemandLoader
from lightning_rl.policies.interface import Policy
from lightning_rl.restoring import check_same_environment, plain_parts, say_changes
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.sampler import Sampler
from lightning_rl.validation import (
    ClassSpec,
    ConfigurationError,
    check,
    check_names,
    check_positive_int,
    did_you_mean,
    is_int,
    to_class_specs,
)


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
        self._bottleneck = BottleneckWatch(self.spec, num_envs)
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
        self._sampler.remember(in_between=not self.rollout_pending)
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
        self._tell_of(rollout.failures)
        return rollout

    def _collect(self) -> Rollout:
        policy, version, dtype, device = self._policy()
        if self.seed is None:
            self.seed = torch.initial_seed() % 2**63
        if self.num_actors:
            if self._source is None:
                self._source = self._start_actors(policy, version, self.seed)
            # Until it arrives a checkpoint may be saved: all that the learner has, it has learned from.
            rollout = self._source.take(self._while_waiting)
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
            hint = self._bottleneck.look(rollout.parts_of_seconds["env"], time.perf_counter())
            if hint is not None:
                rank_zero_info(hint)
        return rollout

    def _start_actors(self, policy: Policy, version: int, seed: int) -> BoundedLag:
        if self._sampler.begin_anew():
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
