"""Phases of a rollout under names of their own in a profiler, where there is one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import ParamSpec, TypeAlias, TypeVar

Profile: TypeAlias = Callable[[str], AbstractContextManager[object]]
"""Opens what is measured under a name: `profile` of Lightning's profilers."""

ENVIRONMENT, POLICY, TRANSFER = "rollout.environment", "rollout.policy", "rollout.transfer"

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def profiled(
    profile: Profile | None, name: str, function: Callable[_Arguments, _Result]
) -> Callable[_Arguments, _Result]:
    """Return a function that does the same and is measured; the function itself, at no cost, where nothing measures.

    Args:
        profile: What measures.
        name: What calls of it are called.
        function: The function.
    """
    if profile is None:
        return function
    opened = profile

    @wraps(function)
    def measured(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with opened(name):
            return function(*args, **kwargs)

    return measured
