"""Definitions shared by environments of every backend: seeds, failures, autoreset, finite values, keys of `info`."""

from __future__ import annotations

import contextlib
import dis
import functools
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import CodeType
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from lightning_rl.validation import ConfigurationError, ExplainedError, check

Array = np.ndarray[Any, Any]
TRAINING, EVALUATION, SAMPLING, MINIBATCHES, TESTING, ACTORS, FILMING = range(7)
"""Roles: the first branch of the tree of seeds."""
MAX_RESTARTS_IN_A_ROW = 3
"""An environment that fails again after so many restarts without a completed step ends the run."""
FAILURE, LOST = "lightning_rl/failure", "lightning_rl/lost"
"""Keys of the `info` of a replaced environment: a list with a message for each restart, which begins the next episode;
and whether the failed step has no outcome."""
IDLE = "lightning_rl/idle"
"""Key of the `info` of a step: rows that ignored their action because they wait for other rows, `[B]`."""
ABSENT = "lightning_rl/absent"
"""Key of the `info` of a reset or step: rows without an agent, whose observations are zeros, `[B]`."""
NUM_AGENTS = "lightning_rl/num_agents"
"""Key of the metadata of environments with several agents: the number of rows of one copy."""
LIFE_LOST = "lightning_rl/life_lost"
"""Key of the `info` of a step: a game that is evaluated as one episode lost a life and continues."""
EnvSettings: TypeAlias = tuple[dict[str, Any], dict[str, Any]]
"""Attributes of environments, and options of their `reset`, both by name."""


_TENSOR = "lightning_rl/tensor"


def to_tensors(value: Any, name: str) -> Any:
    """Return a copy on the CPU of nested plain values, arrays and tensors that a checkpoint can hold, for `to_arrays`.

    Other values raise a `ConfigurationError` with their place in `value`, which is called `name`.
    """
    if isinstance(value, dict):
        return {_to_key(key, name): to_tensors(x, f"{name}.{key}") for key, x in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(to_tensors(x, name) for x in value)
    if isinstance(value, np.ndarray | np.generic):
        with contextlib.suppress(TypeError, ValueError):  # text, objects and foreign byte orders have no tensor
            return torch.from_numpy(np.array(value))
    if isinstance(value, torch.Tensor):
        return {_TENSOR: value.detach().to("cpu", copy=True)}
    expected = "numbers, strings, arrays, tensors, or lists, tuples, sets or dicts of them, which checkpoints can hold"
    check(value is None or type(value) in (bool, int, float, complex, str, bytes), name, value, expected)
    return value


def _to_key(key: Any, name: str) -> Any:
    """Return a key with Python numbers in place of NumPy's, since a tensor would be another key after loading."""
    if type(key) is tuple:
        return tuple(_to_key(x, name) for x in key)
    return to_tensors(key.item() if isinstance(key, np.generic) else key, f"key of {name}")


def to_arrays(value: Any) -> Any:
    """Return the value that `to_tensors` converted; arrays share the memory of their tensors."""
    if isinstance(value, dict):
        return value[_TENSOR] if _TENSOR in value else {key: to_arrays(x) for key, x in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(to_arrays, value))
    return value.numpy()[()] if isinstance(value, torch.Tensor) else value  # a number, not an array without dimensions


def derive_seed(*path: int) -> int:
    """Return the seed at a node of the tree of seeds: below 2^31, independent of the seeds of all other nodes."""
    return int(np.random.SeedSequence(path[0], spawn_key=path[1:]).generate_state(1)[0] >> 1)


def listed(items: Iterable[object], most: int = 8) -> str:
    """Return items separated by commas; if there are more than `most`, the first ones and an ellipsis."""
    shown = [str(item) for item in islice(items, most + 1)]
    return ", ".join(shown[:most]) + (", …" if len(shown) > most else "")


def role_prefix(evaluation: bool) -> str:
    """Return the word by which messages distinguish evaluation environments, whose indices start at 0 too."""
    return "evaluation " if evaluation else ""


def describe(index: int, episode: int, seed: int, step: int, evaluation: bool = False) -> str:
    """Name an environment in a message; `reset(seed=seed)` and the same `step` actions reproduce its state."""
    return f"{role_prefix(evaluation)}environment {index} (episode {episode}, seed {seed}, step {step})"


class EnvironmentFailure(ExplainedError, RuntimeError):
    """An environment raised, died, hung or returned an invalid value; the message names environment and step."""


class WorkerFailure(Exception):
    """Environments `indices` failed; `EnvironmentBatch` adds their episodes and steps."""

    def __init__(self, indices: Sequence[int], what: str) -> None:
        super().__init__(f"environment {listed(indices)} {what}")
        self.indices = indices
        self.what = what


@dataclass(frozen=True)
class Failure:
    """An exception of another process: its text and traceback, since not every exception can be pickled.

    `kind` is `EnvironmentFailure`, `ConfigurationError`, or None for other exceptions.
    """

    kind: type[Exception] | None
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kind = next((k for k in (EnvironmentFailure, ConfigurationError) if isinstance(error, k)), None)
        text = summary(error) if kind is None else str(error)
        return cls(kind, text, "".join(traceback.format_exception(error)))

    def to_error(self, process: str, otherwise: Callable[[str], Exception], prefix: str = "") -> Exception:
        """Return the exception, made by `otherwise` if it has no kind, with the traceback as a note."""
        error = (self.kind or otherwise)(prefix + self.text)
        error.add_note(f"In {process}:\n{self.trace}")
        return error


def give_up(failure: EnvironmentFailure) -> NoReturn:
    """Raise the failure of an environment after too many restarts."""
    raise EnvironmentFailure(
        f"{failure}; {MAX_RESTARTS_IN_A_ROW} restarts in a row, without a completed step in between, did not help"
    ) from failure


@contextlib.contextmanager
def closed_on_failure(owner: Any) -> Iterator[None]:  # an object with `close()`
    """Close environments or their owner if the block raises; the exception of the block is the one to report."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception, SystemExit):
            owner.close()
        raise


def is_failure(error: BaseException) -> bool:
    """Whether an exception from the code of an environment is a failure of the environment.

    `SystemExit` and `KeyboardInterrupt` are failures too, unless a signal handler raised them to end the program.
    """
    if isinstance(error, Exception):
        return True
    return isinstance(error, SystemExit | KeyboardInterrupt) and not _comes_from_signal(error)


def summary(error: BaseException) -> str:
    """Return the class and the text of an exception."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _comes_from_signal(error: BaseException) -> bool:
    if threading.current_thread() is not threading.main_thread():  # Python runs signal handlers in the main thread
        return False
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Python's own handler has no frame, and interrupts any instruction but a `raise` statement.
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        if last is None or dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] != "RAISE_VARARGS":
            return True
    handlers = {_code_of(signal.getsignal(signum)) for signum in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:  # None unless it is written in Python
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return `metadata["autoreset_mode"]`, or raise a `ConfigurationError` if it is missing or no such mode."""
    mode = (env.metadata or {}).get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError:
        raise ConfigurationError(
            f"env_id: {env} has metadata['autoreset_mode']={mode!r}: expected one of "
            f"{[mode.value for mode in AutoresetMode]}, which says when ended episodes are reset"
        ) from None


_LARGEST = np.finfo(np.float32).max  # not a Python float, which float16 would round to infinity
# A sum of squares below this has no term that float32 could not hold.
_SAFE_SQUARES = 1e76


def surely_finite(x: np.ndarray[Any, Any]) -> bool:
    """Whether every entry is certainly finite; False for NaN and infinity, and also for very large numbers."""
    return float(np.vdot(x, x)) < _SAFE_SQUARES


def find_not_finite(name: str, rows: np.ndarray[Any, Any]) -> tuple[int, str] | None:
    """Return the first of `rows`, `[N, ...]`, that is not finite in float32, and the message about it, or None."""
    if surely_finite(rows):
        return None
    places = np.argwhere(~(np.abs(rows) <= _LARGEST))
    if not len(places):
        return None
    row, *entry = places[0].tolist()
    at = f" (entry {', '.join(map(str, entry))})" if entry else ""
    return row, f"returned {name}{at} {rows[tuple(places[0])]}: expected a finite number that float32 can hold"


Find = Callable[[Array], tuple[int, str] | None]
"""A function that returns the first row, of rows `[N, ...]` of a leaf, with a bad value, and the message about it."""


def find_bad(path: str, space: spaces.Space[Any]) -> Find | None:
    """Return the function for one leaf of the space; None for integers of a `Box`."""
    name = f"observation {path}".rstrip()
    if isinstance(space, spaces.MultiBinary):
        return functools.partial(_find_outside, name, space, 0, 1)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        last = space.start + (space.n if isinstance(space, spaces.Discrete) else space.nvec) - 1
        return functools.partial(_find_outside, name, space, space.start, last)
    is_float = space.dtype is not None and np.issubdtype(space.dtype, np.floating)
    return functools.partial(find_not_finite, name) if is_float else None


def _find_outside(name: str, space: spaces.Space[Any], low: Any, high: Any, rows: Array) -> tuple[int, str] | None:
    outside = (rows < low) | (rows > high)  # 2 µs in a step, after which an encoder may fail or ignore the value
    if not np.count_nonzero(outside):
        return None
    index = int(np.argwhere(outside)[0, 0])
    return index, f"returned an {name} {rows[index]}: expected an element of {space}"


class Unexpected(Exception):
    """An environment returned a value that its interface or its space does not allow; the message names the value."""


def to_number(reward: Any) -> float:  # any value of an environment
    """Return a reward as a Python number; raise `Unexpected` unless it is a single number."""
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(reward, str | bytes) and np.ndim(reward) == 0:
            return float(reward)
    several = "; mo_gymnasium.wrappers.LinearReward weights several objectives, ParallelEnvVector adapts several agents"
    raise Unexpected(f"returned reward {reward!r}: expected a number{several if np.ndim(reward) else ''}")


def batch_infos(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the `info` dicts of `B` environments like Gymnasium's vector environments.

    Each key has an array `[B, ...]`, or a dict of such arrays if the values are dicts; under `_<key>` a boolean array
    `[B]` marks the environments that have the key.
    """
    batched: dict[str, Any] = {}
    for key in dict.fromkeys(key for info in infos for key in info):
        values = {index: info[key] for index, info in enumerate(infos) if key in info}
        first = next(iter(values.values()))
        try:
            if isinstance(first, dict) and key != "final_obs":
                batched[key] = batch_infos([info.get(key, {}) for info in infos])
            else:
                batched[key] = _column(len(infos), values, key != "final_obs" and isinstance(first, _NUMERIC))
        except (IndexError, TypeError, ValueError):  # values of different types or shapes
            batched[key] = _column(len(infos), values, False)
        batched[f"_{key}"] = np.array([key in info for info in infos])
    return batched


_NUMERIC = (int, float, np.number, np.bool_, np.ndarray)


def _column(length: int, values: dict[int, Any], of_numbers: bool) -> np.ndarray[Any, Any]:
    """Return an array `[length, ...]` with values of `info` at their indices, of numbers or of objects."""
    numbers = np.array([*values.values()]) if of_numbers else None  # in a dtype for all of them
    if numbers is None or numbers.dtype.kind not in "biuf":  # such as a number beside None
        column = np.full(length, None, object)
        for index, value in values.items():
            column[index] = value
        return column
    if len(numbers) == length:
        return numbers
    column = np.zeros((length, *numbers.shape[1:]), numbers.dtype)
    column[list(values)] = numbers
    return column


class EpisodeTracker:
    """Tracks the episode, seed and step of `B` environments, for error messages and for replaced workers.

    Attributes:
        clock: Steps since the first reset.
        streams: Seed of each environment's stream; after resuming, the seed of the previous run.
        episodes: Current episode of each environment, `[B]`.
        began: `clock` at the start of that episode, `[B]`.
    """

    def __init__(self, seeds: list[int], reset_seed: list[int] | Array | int | None, evaluation: bool = False) -> None:
        self._seeds = seeds
        self._reset_seed = reset_seed
        self._evaluation = evaluation
        self.reset()

    def reset(self) -> None:
        self.clock = 0
        self.streams = list(self._seeds)
        self.episodes = np.zeros(len(self._seeds), np.int64)
        self.began = np.zeros(len(self._seeds), np.int64)

    def start(self, which: Array, in_steps: int = 0) -> None:
        """Start the next episode of the environments in the mask `which`, `[B]`, `in_steps` steps from now."""
        self.episodes += which
        self.began[which] = self.clock + in_steps

    def restart(self, index: int, times: int) -> None:
        """Start the next episode of an environment after each of some restarts."""
        self.episodes[index] += times
        self.began[index] = self.clock

    def where(self, index: int) -> tuple[int, int, int]:
        return self.streams[index], int(self.episodes[index]), max(0, self.clock - int(self.began[index]))

    def label_at(self, index: int, episode: int, step: int) -> str:
        if isinstance(self._reset_seed, list):
            seed = derive_seed(self.streams[index], episode)
        else:
            seed = self._seeds[0 if isinstance(self._reset_seed, int) else index]
        return describe(index, episode, seed, step, self._evaluation)

    def labels(self, indices: Sequence[int]) -> str:
        return listed(self.label_at(index, *self.where(index)[1:]) for index in indices)

    def restore(self, records: Sequence[dict[str, Any]]) -> None:
        """Set the stream, episode and step of each environment from its `SeededEpisodes.recorded`."""
        self.streams = [record["stream_seed"] for record in records]
        self.episodes[:] = [record["episode"] for record in records]
        self.began[:] = [self.clock - record.get("step_count", 0) for record in records]
