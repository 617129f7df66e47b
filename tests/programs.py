"""Programs that tests start. Each is a process of its own, but does not spend seconds on importing.

They are forked from a server, a new interpreter that has imported what this package uses, not the package itself, and
done nothing else. What a program finds is what `python` would give it: arguments, environment, folder, path of modules,
`__main__`. Tests of imports, and of how an interpreter begins and ends, start `sys.executable` instead.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import math
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, TextIO

ROOT = Path(__file__).parents[1]
IMPORTED = (
    *("lightning.pytorch.cli", "torchmetrics", "torch.utils.tensorboard", "rich.progress"),
    *("gymnasium.vector", "gymnasium.envs.classic_control.cartpole"),
)
TORCHRUN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
MAX_REQUEST = 100_000  # bytes; a socket takes more in one message


class Program:
    """A process that runs what `python` would be told to, with the methods of `subprocess.Popen` that tests need.

    Args:
        arguments: As those of `python`: `-m module …`, `-c code …` or `script …`.
        cwd: Folder to run in; that of the tests if `None`.
        env: All variables of its environment; those of the tests if `None`.
        join: Whether its errors go to its output.
        ranks: Number of further ranks that it starts, by Lightning or `torchrun`, which are `Rank`s.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        join: bool = False,
        ranks: int = 0,
    ) -> None:
        self.args = arguments
        self.returncode: int | None = None
        request = {
            "arguments": arguments,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "ranks": ranks,
        }
        self._status, theirs = socket.socketpair()
        self.stdout, out = _pipe()
        self.stderr, err = (self.stdout, os.dup(out)) if join else _pipe()
        message = json.dumps(request).encode()
        assert len(message) < MAX_REQUEST
        socket.send_fds(_server(), [message], [theirs.fileno(), out, err])
        theirs.close()
        os.close(out)
        os.close(err)
        self.pid = int.from_bytes(self._status.recv(8), "little")

    def wait(self, timeout: float = 120) -> int:
        """Return the exit status, negative for a signal; raise `subprocess.TimeoutExpired` if it does not end."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int.from_bytes(self._status.recv(8), "little", signed=True)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout) from None
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit status, or `None` while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Return what it and the processes that it leaves behind write to its output and as errors."""
        files = [self.stdout] if self.stderr is self.stdout else [self.stdout, self.stderr]
        with ThreadPoolExecutor() as pool:
            texts = [pool.submit(file.read) for file in files]
            try:
                self.wait(timeout)
                out, *err = [text.result(timeout) for text in texts]
            except (subprocess.TimeoutExpired, TimeoutError):
                self.kill()
                raise
        return out, "".join(err)

    def __del__(self) -> None:
        for file in (self._status, self.stdout, self.stderr):
            file.close()

    def kill(self) -> None:
        """End it and the processes that it has started, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Child:
    """A process that this process has forked."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or `None` while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Fork(Child):
    """A Python program that is forked from this process instead of started, in place of `subprocess.Popen`.

    It finds what this process has imported, and has none of its files and signal handlers.

    Args:
        command: The interpreter, which is not started, and its arguments.
        stdout: Where it writes its output and errors.
        env: All variables of its environment.
        preexec_fn: Called in the new process before the program.
        start_new_session: Whether it runs in a new session.
    """

    def __init__(
        self,
        command: list[str],
        *,
        stdout: TextIO,
        env: Mapping[str, str],
        preexec_fn: Callable[[], None],
        start_new_session: bool,
        **_: object,
    ) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            if start_new_session:
                os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            preexec_fn()
            os.dup2(stdout.fileno(), 1)
            os.dup2(stdout.fileno(), 2)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            os._exit(_run(command[1:], os.getcwd(), dict(env), sys.path[1:]))


class Rank(Child):
    """A rank that a program starts, in place of `subprocess.Popen`: forked before the program has begun.

    So it is a child of the program that has imported what the server has.
    """

    _waiting: ClassVar[list[tuple[int, int]]] = []
    """Numbers of the processes that wait for what they are to run, and where to tell them."""

    @classmethod
    def prepare(cls, number: int, program: str, base: list[str]) -> None:
        """Fork the processes, and have Lightning, or `torchrun` if it is the program, take them."""
        for _ in range(number):
            readable, writable = os.pipe()
            pid = os.fork()
            if pid == 0:
                for _, other in (*cls._waiting, (0, writable)):
                    os.close(other)
                with open(readable) as file:
                    request = file.read()
                if not request:  # the program has ended
                    os._exit(0)
                asked = json.loads(request)
                if asked.pop("start_new_session"):
                    os.setsid()
                os._exit(_run(**asked, base=base))
            os.close(readable)
            cls._waiting.append((pid, writable))
        if program == "torch.distributed.run":
            importlib.import_module(TORCHRUN).Popen = cls
        elif number:
            launcher = importlib.import_module("lightning.pytorch.strategies.launchers.subprocess_script")
            launcher.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": cls})

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        start_new_session: bool = False,
        **_: object,
    ) -> None:
        self.args = args
        self.pid, told = self._waiting.pop(0)
        arguments = [argument for argument in args[1:] if argument != "-u"]  # which `torchrun` adds
        asked = {"arguments": arguments, "cwd": cwd or os.getcwd(), "env": dict(env)}
        with open(told, "w") as file:
            json.dump(asked | {"start_new_session": start_new_session}, file)

    def wait(self, timeout: float = math.inf) -> int:
        """Return the exit status; raise `subprocess.TimeoutExpired` if it does not end."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def run(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, ranks: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    program = Program(*arguments, cwd=cwd, env=env, ranks=ranks)
    out, err = program.communicate()
    return subprocess.CompletedProcess(arguments, program.wait(), out, err)


def run_ranks(*arguments: str, cwd: Path | None = None) -> str:
    """Run a program on two ranks of `strategy='ddp'`, started as by a cluster; return what both wrote."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        Program(*arguments, cwd=cwd, env={**os.environ, **shared, "LOCAL_RANK": str(rank)}, join=True)
        for rank in range(2)
    ]
    texts = communicate(ranks)
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(texts)
    return "".join(texts)


def communicate(programs: list[Program]) -> list[str]:
    """Run programs of which each waits for the others; return what they wrote to their outputs."""
    with ThreadPoolExecutor() as pool:
        return [text for text, _ in pool.map(Program.communicate, programs)]


def _pipe() -> tuple[TextIO, int]:
    """What a program writes, and where."""
    readable, writable = os.pipe()
    return open(readable, encoding="utf-8"), writable


@functools.cache
def _server() -> socket.socket:
    """Start the server, once for all tests of this process; it ends when this socket does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.programs", str(theirs.fileno())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# ------------------------------------------------------------------ in the server


def _serve(requests: socket.socket) -> None:
    """Fork a program for each request until the tests have ended."""
    gc.disable()  # collections would search the modules again and again
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # so that collections of the programs copy no memory
    gc.enable()
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    base = [entry for entry in sys.path[1:] if entry not in {*given}]
    while True:
        message, files, *_ = socket.recv_fds(requests, MAX_REQUEST, 3)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # guards that have ended
                continue
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            _guard(json.loads(message), files, base)
        for file in files:
            os.close(file)


def _guard(request: dict, files: list[int], base: list[str]) -> None:
    """Fork a program and tell the tests its number and, when it has ended, its status."""
    status, out, err = files
    pid = os.fork()
    if pid == 0:
        os.close(status)
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        Rank.prepare(request.pop("ranks"), request["arguments"][1], base)
        os._exit(_run(**request, base=base))
    os.close(out)
    os.close(err)
    os.write(status, pid.to_bytes(8, "little"))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        os.write(status, code.to_bytes(8, "little", signed=True))
    os._exit(0)


def _run(arguments: list[str], cwd: str, env: dict[str, str], base: list[str]) -> int:
    """Do what `python` does with its arguments, from finding the program to the end of the interpreter."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    path = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *base]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        if arguments[0] == "-m":
            sys.path[:] = [cwd, *path]
            sys.argv[:] = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.path[:] = ["", *path]
            sys.argv[:] = ["-c", *arguments[2:]]
            main = type(sys)("__main__")
            sys.modules["__main__"] = main
            exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        else:
            sys.path[:] = [str(Path(cwd, arguments[0]).parent), *path]
            sys.argv[:] = arguments
            runpy.run_path(str(Path(cwd, arguments[0])), run_name="__main__")  # further processes import this path
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
