"""Values that no option was made for, and what becomes of them; `python -m tests.option_probes` tries many more.

The rule: an algorithm or a data module that is given such a value is made and then trains, or it raises a
`ConfigurationError`. Training may also end with the `FloatingPointError` that `OnPolicyAlgorithm.training_step`
documents: a number in its range may still be so large that a loss is not finite. Optimizers and schedulers of PyTorch
may raise their own errors. Options are found in the signatures.
"""

import argparse
import contextlib
import inspect
import random
import signal
import tempfile
import traceback
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

import lightning_rl
from lightning_rl import AtariPreprocessing, BehaviourCloning, OnPolicyAlgorithm, RecordedEpisodes, RolloutDataModule
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.options import defaults_of, nested
from lightning_rl.validation import ConfigurationError
from tests.helpers import make_trainer

ALGORITHMS: list[type[Any]] = [
    found
    for name in lightning_rl.__all__
    if inspect.isclass(found := getattr(lightning_rl, name))
    and issubclass(found, OnPolicyAlgorithm)
    and found is not OnPolicyAlgorithm
]
DATA_MODULES: list[type[Any]] = [RolloutDataModule, RecordedEpisodes]
ENVIRONMENTS = ["CartPole-v1", "Pendulum-v1"]

_NUMBERS = [0, 1, -1, 2, 3, 2**63, -(2**63), 10**400, 0.0, 0.5, -0.5, 1.0, 1e-300, 1e30, -1e30, 1e300]
_NOT_FINITE = [float("nan"), float("inf"), -float("inf")]
_TEXTS = ["", "x", "a.b", "torch.nn.Linear", "torch.no_such.Thing", ":", b"x", "\0"]
_LISTS: list[Any] = [[], [0], [1], [None], ["x"], [[]], [{}], (), (1, 2), [float("nan")], [2**63]]
_DICTS: list[Any] = [{}, {"x": 1}, {0: 1}, {None: {}}, {"x": {}}, {"x": None}, {"kind": []}, {"kind": "x"}]
_OBJECTS = [object(), int, print, np.float32(0.5), np.arange(2), torch.zeros(2), {1}, Path("x"), range(3), ...]
KINDS = [[None], [True, False], _NUMBERS, _NOT_FINITE, _TEXTS, _LISTS, _DICTS, _OBJECTS]
VALUES: list[Any] = [value for kind in KINDS for value in kind]
"""Of every kind, and at the ends of ranges."""


def _class(path: str, *names: str) -> list[Callable[[Any], Any]]:
    """Specs of a class with a value for one of its arguments."""
    return [lambda v, name=name: {"class_path": path, "init_args": {name: v}} for name in names]


def _optimizer(path: str, *names: str) -> list[Callable[[Any], Any]]:
    """Groups of options that name an optimizer, with a value for one of its arguments."""
    return [lambda v, name=name: {"name": path, "options": {name: v}} for name in names]


def _scheduler(name: str, *arguments: str) -> list[Callable[[Any], Any]]:
    """Groups of options that name a scheduler, with a value for one of its arguments."""
    return [
        lambda v, spec=spec: {"scheduler": spec(v)}
        for spec in _optimizer(f"torch.optim.lr_scheduler.{name}", *arguments)
    ]


_SHAPES: list[Callable[[Any], Any]] = [
    lambda v: [v],
    lambda v: {"x": v},
    lambda v: {"class_path": v},
    lambda v: [{"class_path": v}],
    lambda v: {"name": v},
    lambda v: {"options": v},
    lambda v: {"name": "torch.optim.SGD", "options": v},
    *_optimizer("torch.optim.SGD", "momentum", "weight_decay", "nesterov", "foreach"),
    *_optimizer("torch.optim.Adam", "betas", "eps", "amsgrad", "fused", "capturable"),
    *_scheduler("StepLR", "step_size"),
    *_scheduler("CosineAnnealingLR", "T_max", "eta_min"),
    *_scheduler("ExponentialLR", "gamma"),
    *_scheduler("LinearLR", "start_factor", "total_iters"),
    *_class(
        "lightning_rl.policies.networks.mlp.MLPEncoder", "hidden_sizes", "activation", "discrete_encoding", "encoders"
    ),
    lambda v: {"kind": v},
    lambda v: {"kind": "constant", "value": v},
    lambda v: {"kind": "linear", "start": v, "end": 0.1},
    lambda v: {"kind": "cosine", "start": 0.1, "end": 0.1, "over": v},
    lambda v: {"kind": "piecewise", "points": v},
    lambda v: {"kind": "piecewise", "points": [[0, 0.1], [v, v]]},
    *(lambda v, n=n: {"kind": "lstm", n: v} for n in ("hidden_size", "num_layers", "separate", "sequence_length")),
    lambda v: {"kind": "gru", "sequence_length": 4, "burn_in": v},
    *(
        lambda v, n=n, k=k: {"kind": k, n: v}
        for k in ("gaussian", "squashed_gaussian", "beta", "autoregressive", "normal")
        for n in (
            "init_std",
            "std",
            "initial_log_std",
            "min_std",
            "state_dependent_std",
            "entropy",
            "samples",
            "bounds",
        )
    ),
    lambda v: {"value_head": v},
    *(lambda v, n=n: {"value_head": {n: v}} for n in ("learning_rate_scale", "weight_decay", "betas", "eps", "x")),
    *(lambda v, n=n: {n: v} for n in ("clip", "epsilon", "initial_variance", "CPU", "g", "render_mode", "target_kl")),
    lambda v: {"max": v, "gamma": 0.5},
    lambda v: {"max": 2, "gamma": v},
    *(lambda v, n=n: {"target_kl": 0.01, n: v} for n in ("factor", "minimum", "maximum")),
    lambda v: [{"class_path": "gymnasium.wrappers.TimeLimit", "init_args": {"max_episode_steps": v}}],
    lambda v: [{"class_path": "gymnasium.wrappers.TransformReward", "init_args": v}],
    *(lambda v, n=x.name: AtariPreprocessing(**{n: v}) for x in fields(AtariPreprocessing)),
]
"""What options of several parts look like, with a place for a value."""

_CLASSES = [
    f"{module.__name__}.{name}"
    for module in (torch.optim, torch.optim.lr_scheduler)
    for name, found in vars(module).items()
    if inspect.isclass(found)
]


@dataclass(frozen=True)
class Case:
    """A class with some of its options.

    Attributes:
        made: Algorithm or data module.
        options: Besides those that make it small, by full name.
        env_id: The environment.
    """

    made: type[Any]
    options: Mapping[str, Any]
    env_id: str = ENVIRONMENTS[0]

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r:.200}" for name, value in self.options.items())
        return f"{self.made.__name__}({given}) on {self.env_id}"

    @property
    def is_bounded(self) -> bool:
        """Whether training is: counts that are large take as long, or as much memory, as they say."""
        return not any(_counts_more_than(value, 100) for value in self.options.values())


def _counts_more_than(value: Any, limit: int) -> bool:
    if isinstance(value, Mapping):
        return any(_counts_more_than(part, limit) for part in value.values())
    if isinstance(value, list | tuple):
        return any(_counts_more_than(part, limit) for part in value)
    if isinstance(value, AtariPreprocessing):
        return _counts_more_than(vars(value), limit)
    return isinstance(value, int) and abs(value) > limit


_SLOW = ("async", "compiled")
"""Values that start worker processes or a compiler."""


class Option(NamedTuple):
    """An option of a class: its default, `inspect.Parameter.empty` without one, and its annotation."""

    default: Any
    hint: Any


@cache
def options_of(made: type[Any]) -> dict[str, tuple[type[Any], Option]]:
    """Every option of a class by its full name, groups too, with the class that defines it."""
    found: dict[str, tuple[type[Any], Option]] = {}
    defaults = defaults_of(made)
    for cls in made.__mro__:
        if "__init__" not in vars(cls) or not cls.__module__.startswith(("lightning_rl.", "tests.")):
            continue
        hints = typing.get_type_hints(cls.__init__)
        for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                option = Option(defaults.get(parameter.name, parameter.default), hints.get(parameter.name))
                for name, part in _with_fields(parameter.name, option):
                    found.setdefault(name, (cls, part))
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls.__init__).parameters.values()):
            break
    return found


def _with_fields(name: str, option: Option) -> Iterator[tuple[str, Option]]:
    """Yield an option, and those in it if it is a group."""
    yield name, option
    if is_dataclass(option.default):
        hints = typing.get_type_hints(type(option.default))
        for field in fields(option.default):
            inner = Option(getattr(option.default, field.name), hints[field.name])
            yield from _with_fields(f"{name}.{field.name}", inner)


def cases_of_every_kind(made: type[Any], generator: random.Random) -> Iterator[Case]:
    """Every option of a class with a value of each kind; options of a base, which other classes share, with one."""
    for name, (owner, _) in options_of(made).items():
        for kind in KINDS if owner is made else [generator.choice(KINDS)]:
            yield Case(made, {name: generator.choice(kind)}, generator.choice(ENVIRONMENTS))


@cache
def meant_values(made: type[Any], name: str) -> list[Any]:
    """Values that an option is made for, as far as its annotation says."""
    _, option = options_of(made)[name]

    def of(hint: Any) -> list[Any]:
        if typing.get_origin(hint) is typing.Literal:
            return list(typing.get_args(hint))
        if hint is bool:
            return [True, False]
        return [value for part in typing.get_args(hint) for value in of(part)]

    return [value for value in of(option.hint) if value not in _SLOW]


def random_value(generator: random.Random) -> Any:
    """A value of `VALUES`, often in a structure."""
    value = generator.choice(VALUES)
    chance = generator.random()
    if chance < 0.05:
        return generator.choice(_CLASSES)
    if chance < 0.4:
        return value
    with contextlib.suppress(ConfigurationError):
        return generator.choice(_SHAPES)(value)
    return value


def random_case(made: type[Any], generator: random.Random) -> Case:
    """An option with a random value, beside up to two with values that they are made for."""
    names = list(options_of(made))
    options: dict[str, Any] = {}
    for name in generator.sample(names, generator.randint(0, 2)):
        if meant := meant_values(made, name):
            options[name] = generator.choice(meant)
    options[generator.choice(names)] = random_value(generator)
    return Case(made, options, generator.choice(ENVIRONMENTS))


class _AsAgent(gymnasium.ObservationWrapper):
    """An environment as one of two agents, with `agent` and `state` in its observations, as `MAPPO` needs them."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        seen = env.observation_space
        parts = {"observation": seen, "agent": gymnasium.spaces.Discrete(2), "state": seen}
        self.observation_space = gymnasium.spaces.Dict(parts)

    def observation(self, observation: Any) -> Any:
        return {"observation": observation, "agent": np.int64(1), "state": observation}


for _env_id in ENVIRONMENTS:
    gymnasium.register(f"Agent/{_env_id}", lambda env_id=_env_id, **kwargs: _AsAgent(gymnasium.make(env_id, **kwargs)))


def _env_id_of(case: "Case") -> str:
    return f"Agent/{case.env_id}" if case.made is lightning_rl.MAPPO else case.env_id


@cache
def _spaces(env_id: str) -> dict[str, Any]:
    env = gymnasium.make(env_id)
    return {"observation_space": env.observation_space, "action_space": env.action_space}


@cache
def _recorded(env_id: str) -> Any:
    """Two episodes, as `predict` returns them."""
    data = RolloutDataModule(env_id, evaluation={"episodes": 2, "num_envs": 2}, env={"max_episode_steps": 10}, seed=0)
    model = lightning_rl.PPO(**_spaces(env_id), policy={"hidden_sizes": (4,)})
    batches = make_trainer().predict(model, data)
    assert batches is not None
    return batches[0]


@cache
def _teacher(env_id: str) -> str:
    """The path of a checkpoint, for algorithms that learn from a teacher."""
    path = Path(tempfile.mkdtemp()) / "teacher.ckpt"
    trainer = make_trainer()
    trainer.strategy.connect(lightning_rl.PPO(**_spaces(env_id), policy={"hidden_sizes": (4,)}))
    trainer.save_checkpoint(path)
    return str(path)


def make(case: Case) -> Any:
    """Make the algorithm or the data module.

    Raises:
        ConfigurationError: It refuses its options.
    """
    known = options_of(case.made)
    if issubclass(case.made, OnPolicyAlgorithm):
        small: dict[str, Any] = {"policy.hidden_sizes": (4,), "num_minibatches": 2, "num_epochs": 1}
        small |= _spaces(_env_id_of(case))
        if "teacher" in known:
            small["teacher"] = _teacher(case.env_id)
        small |= {"num_policy_iterations": 2, "num_aux_epochs": 1, "num_aux_minibatches": 2}
    else:
        small = {"env_id": case.env_id, "num_envs": 2, "rollout_length": 8, "rollouts_per_epoch": 2, "seed": 0}
        small |= {"evaluation.episodes": 2, "env.max_episode_steps": 10}
        if "episodes" in known:
            small["episodes"] = _recorded(case.env_id)
    small = {name: value for name, value in small.items() if name in known}
    given = small | dict(case.options)
    # A group that is given as a whole takes the place of its options.
    return case.made(**nested({name: x for name, x in given.items() if not _is_inside(name, given)}))


def _is_inside(name: str, given: Mapping[str, Any]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in given for length in range(1, len(parts)))


def train(case: Case, made: Any) -> None:
    """Train for two rollouts, and validate.

    Args:
        case: What `made` was made of.
        made: The algorithm or the data module.
    """
    torch.manual_seed(0)
    if isinstance(made, OnPolicyAlgorithm):
        model, data = made, make(Case(RecordedEpisodes if _clones(made) else RolloutDataModule, {}, _env_id_of(case)))
    else:
        learner = BehaviourCloning if isinstance(made, RecordedEpisodes) else lightning_rl.PPO
        if made.num_actors:
            learner = lightning_rl.IMPALA
        observation_space, action_space = made.observation_space, made.action_space
        options = {"observation_space": observation_space, "action_space": action_space, "num_minibatches": 1}
        model, data = make(Case(learner, {n: v for n, v in options.items() if n in options_of(learner)})), made
    make_trainer(limit_val_batches=1).fit(model, data)


def _clones(made: Any) -> bool:
    return isinstance(made, BehaviourCloning)


class Outcome(NamedTuple):
    """What becomes of a case: `refused`, `made`, `trained`, `not finite`, or `fault`, with what was raised."""

    kind: str
    error: BaseException | None = None


def outcome(case: Case, trains: bool = True) -> Outcome:
    """Return what becomes of a case.

    Args:
        case: The class and its options.
        trains: Also train for a few steps, if that is bounded.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = make(case)
            if not trains or not case.is_bounded:
                return Outcome("made")
            train(case, made)
        except ConfigurationError as error:
            return Outcome("refused", error)
        except FloatingPointError as error:
            return Outcome("not finite", error)
        except EnvironmentFailure as error:
            known = not {"env.kwargs", "env.wrappers", "env.training_wrappers"}.isdisjoint(case.options)
            return Outcome("refused" if known else "fault", error)
        except Exception as error:
            files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            return Outcome("refused" if any("torch/optim/" in file for file in files) else "fault", error)
    return Outcome("trained")


class _TooLongError(Exception):
    pass


def _main() -> None:
    parser = argparse.ArgumentParser(description="Try random options, and print what is raised against the rule.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--only", default="", help="names of classes, separated by commas")
    parser.add_argument("--make-only", action="store_true")
    parser.add_argument("--seconds", type=int, default=30, help="for each case")
    given = parser.parse_args()

    def too_long(*_: Any) -> None:
        raise _TooLongError

    signal.signal(signal.SIGALRM, too_long)
    torch.set_num_threads(1)
    generator = random.Random(given.seed)
    classes = [x for x in [*ALGORITHMS, *DATA_MODULES] if not given.only or x.__name__ in given.only.split(",")]
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    while sum(outcomes.values()) < given.cases:
        case = random_case(generator.choice(classes), generator)
        if not given.make_only and outcome(case, trains=False).kind == "refused":
            continue
        signal.alarm(given.seconds)
        kind, error = outcome(case, not given.make_only)
        signal.alarm(0)
        outcomes[kind] += 1
        if kind == "fault":
            assert error is not None
            frames = [x for x in traceback.extract_tb(error.__traceback__) if "/lightning_rl/" in x.filename]
            place = " < ".join(f"{Path(x.filename).name}:{x.lineno}" for x in frames[-3:][::-1])
            where = f"{type(error).__name__} at {place}"
            faults[where] += 1
            if faults[where] <= 2:
                print(f"{case}\n  {where}: {str(error)[:300]}", flush=True)
    print(f"{dict(outcomes)}, faults in {len(faults)} places")


if __name__ == "__main__":
    _main()
