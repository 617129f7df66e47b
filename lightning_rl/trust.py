"""Decides which modules loaded data may import: this package, PyTorch, Gymnasium, and modules that the user trusts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ALWAYS = ("lightning_rl", "torch", "gymnasium")
# None outside `loading`: the user named the classes.
_trusted: ContextVar[tuple[str, ...] | None] = ContextVar("trusted", default=None)


@contextmanager
def loading(trust: Iterable[str] = ()) -> Iterator[None]:
    """Treat the class paths, modules and environment ids that are used inside as loaded data, not as the user's words.

    Args:
        trust: Packages whose modules may be imported besides `lightning_rl`, `torch` and `gymnasium`. A module that
            Python has imported already is trusted without being listed.
    """
    token = _trusted.set((trust,) if isinstance(trust, str) else tuple(trust))
    try:
        yield
    finally:
        _trusted.reset(token)


def is_loading() -> bool:
    """Return whether `loading` is active."""
    return _trusted.get() is not None


def may_import(module: str) -> bool:
    """Return whether a module may be imported here; outside `loading` every module may."""
    trusted = _trusted.get()
    if trusted is None or module in sys.modules:
        return True
    # Importing `package.__main__` runs a program.
    parents = module.split(".")
    return "__main__" not in parents and any(f"{module}.".startswith(f"{name}.") for name in (*_ALWAYS, *trusted))
