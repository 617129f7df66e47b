"""Evaluation as a `LightningDataModule` has it: episodes that are played, recorded and filmed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import torch
from gymnasium import spaces
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_rl.environments import EnvironmentFailure, EnvironmentSpec, FilmMaker, check_filmable, spaces_of
from lightning_rl.environments.seeding import EVALUATION, FILMING, TESTING
from lightning_rl.evaluator import Evaluator
from lightning_rl.files import read_data
from lightning_rl.loaders import OnDemandLoader
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.policies.interface import Policy
from lightning_rl.rollouts.episode import Episode
from lightning_rl.sampler import take_failures
from lightning_rl.validation import (
    ConfigurationError,
    check,
    check_bool,
    check_positive_int,
    constructor_options,
    loading,
)

T = TypeVar("T")


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
        self._told_of_failure = False

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
        return self._loader(self.play, 1)

    def test_dataloader(self) -> OnDemandLoader[list[Episode]]:
        """Return the loader of one set of evaluation episodes, other ones than those that validation selects by."""
        return self._loader(partial(self.play, role=TESTING), 1)

    def predict_dataloader(self) -> OnDemandLoader[list[Episode]]:
        """Return the loader of one set of evaluation episodes with their observations, actions and rewards."""
        return self._loader(partial(self.play, role=TESTING, record=True), 1)

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

    def play(self, role: int = EVALUATION, record: bool = False) -> list[Episode]:
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
        return self._play(evaluator, shares[self._rank], role, record=record, films=films, first_number=first)

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
            return self._play(evaluator, num_episodes, FILMING, films=films)
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

    def _play(self, evaluator: Evaluator, num_episodes: int, role: int, **options: Any) -> list[Episode]:  # noqa: ANN401
        assert self.trainer is not None
        policy, _, dtype, device = self._policy()
        seed = self.seed if self.seed is not None else torch.initial_seed() % 2**63
        options = {"record": False, "deterministic": self.eval_deterministic} | options
        with self._rank_named(), self.trainer.precision_plugin.forward_context():
            path = (seed, role, self._rank)
            episodes = evaluator.play(policy, self._probe(), num_episodes, path, device, dtype, **options)
        self._tell_of(take_failures(evaluator.environments))
        return episodes

    def _tell_of(self, failures: Sequence[str] | None) -> None:
        """Tell of the first environment that was replaced."""
        if failures and not self._told_of_failure:
            self._told_of_failure = True
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
