"""Errors of a run on several ranks: the rank where it began says what happened, the others end without a word."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# Seconds that the ranks started by this one get before they are ended by force: to say what happened to them; and to
# notice on their own that this one is about to end, which those that wait for it in a collective call do not.
_TO_SAY, _TO_NOTICE = 10.0, 2.0
# Of a rank that another one started, that one.
_PARENT = os.getppid()
_CLAIM = "lightning_rl/failed"
_CONNECTION_LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|gloo/transport|NCCL|TCPStore")


class RankFailure(RuntimeError):
    """Another rank is gone and did not say why."""


def end_all_ranks(error: Exception, children: list[subprocess.Popen[bytes]]) -> None:
    """End this rank and those it started because of an error; return on the one rank that is to tell it.

    What fails on every rank, such as a gradient that is not finite, is told once; and that another rank is gone is
    told by no rank if that one says itself what happened to it.

    Args:
        error: What was raised on this rank.
        children: Processes of the ranks that this one started; none where something else did.

    Raises:
        SystemExit: Another rank tells what happened.
        RankFailure: Another rank is gone, and cannot tell.
    """
    # Held until the others have ended: the first rank serves it.
    store = torch.distributed.distributed_c10d._get_default_store()
    started = list(children)
    children.clear()  # or Lightning's observer would kill this process as soon as it sees one of them end
    if not _is_connection_lost(error):
        tells = _claims(store)
        _wait(started, _TO_NOTICE if tells else _TO_SAY)
        if tells:
            return
        sys.exit(1)
    codes = _wait(started, _TO_SAY)
    if _is_claimed(store, 0.0 if started else _TO_SAY):
        sys.exit(1)
    raise RankFailure(_what_happened(codes)) from error


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that led to it, each once: one that is raised twice may be its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _is_connection_lost(error: BaseException) -> bool:
    """Whether everything began with the connection to another rank."""
    *_, error = causes(error)
    known = isinstance(error, torch.distributed.DistError)
    return known or (isinstance(error, RuntimeError) and _CONNECTION_LOST.search(str(error)) is not None)


def _claims(store: Any) -> bool:  # noqa: ANN401 - torch has no type for it where it lacks distribution
    """Whether this rank is the first to fail."""
    try:
        return bool(store.add(_CLAIM, 1) == 1)
    except RuntimeError:  # the first rank, which serves the store, is gone
        return True


def _is_claimed(store: Any, seconds: float) -> bool:  # noqa: ANN401 - likewise
    """Whether some rank says what happened, now or within some seconds."""
    deadline = time.monotonic() + seconds
    while os.getppid() == _PARENT:  # asking the store of a rank that was killed prints pages
        try:
            if store.check([_CLAIM]):
                return True
        except RuntimeError:
            return False
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return False


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Return the exit codes of processes once they have ended; kill those that take too long."""
    deadline = time.monotonic() + seconds
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            codes.append(0)  # it did not fail, it was made to end
    return codes


def _what_happened(codes: Sequence[int]) -> str:
    """Say which rank is gone, as far as the exit codes of the further ranks tell."""
    for rank, code in enumerate(codes, start=1):
        if code < 0:
            return f"rank {rank} was killed by {signal.Signals(-code).name}"
        if code > 0:
            return f"rank {rank} ended with exit code {code}"
    return "the connection to another rank was lost: it was killed, or its own error says more"
