"""A fake of Ray in this process: calls run when the learner waits for them, in their order."""

import pickle
import signal
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

from lightning.pytorch.utilities import rank_zero_only


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class RayTaskError(RayError):
    pass


class Reference:
    """Reference to a value, or to a call that has not run."""

    def __init__(self, value=None, call=None):
        self.value, self.call, self.error = value, call, None

    def look(self):
        """Run the call if possible, and return whether there is a value or an error."""
        if self.call is not None and self.error is None:
            try:
                self.value = self.call()
            except RayActorError as error:
                self.error = error
            except NotYet:
                return False
            self.call = None
        return True


class NotYet(Exception):
    pass


class Method:
    def __init__(self, handle, name, max_task_retries=-1):
        self.handle, self.name, self.max_task_retries = handle, name, max_task_retries

    def options(self, max_task_retries):
        return Method(self.handle, self.name, max_task_retries)

    def remote(self, *args):
        self.handle.calls.append((self.name, args))
        life = self.handle.lives

        def call():
            if self.max_task_retries == 0 and self.handle.lives != life:
                raise RayActorError("it died")
            rank = rank_zero_only.rank  # an actor changes the rank of its process
            try:
                worker = self.handle.worker()
                return sent(getattr(worker, self.name)(*[sent(value_of(x)) for x in args]))
            finally:
                rank_zero_only.rank = rank

        return Reference(call=call)


class Handle:
    """An actor, which dies on `die`, and only runs while it has a place."""

    def __init__(self, ray, kind, options, args):
        self.ray, self.kind, self.options, self.args = ray, kind, options, args
        self.lives, self.has_place, self.calls = 0, True, []
        self._worker = None
        self.workers = []

    def __getattr__(self, name):
        return Method(self, name)

    def worker(self):
        if not self.has_place:
            raise NotYet
        if self._worker is None:
            self._worker = self.kind(*sent(self.args))
            self.workers.append(self._worker)
        return self._worker

    def die(self):
        """End the process and all its calls."""
        self.lives += 1
        self.replace()

    def replace(self):
        """Let another process answer the waiting calls."""
        self._worker = None


def value_of(x):
    return x.value if isinstance(x, Reference) else x


def sent(x):
    """Return the copy that arrives in another process."""
    return pickle.loads(pickle.dumps(x))


class FakeRay(ModuleType):
    def __init__(self, cpus=8):
        super().__init__("ray")
        self.__spec__ = ModuleSpec("ray", None)
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, RayActorError=RayActorError)
        self.cpus, self.handles, self.puts, self.killed = cpus, [], [], []
        self.address, self.sessions, self.running, self.on_wait = "never", 0, False, lambda: None

    def is_initialized(self):
        return self.running

    def init(self, address=None):
        if address == "nowhere":
            raise ConnectionError("nobody answers")
        self.address, self.sessions, self.running = address, self.sessions + 1, True
        signal.signal(signal.SIGTERM, self.on_sigterm)  # as Ray does

    def on_sigterm(self, signum, frame):
        raise SystemExit(signum)

    def shutdown(self):
        self.running = False

    def cluster_resources(self):
        return {"CPU": float(self.cpus)}

    def put(self, value):
        self.puts.append(value)
        return Reference(sent(value))

    def get(self, reference):
        if reference.error is not None:
            raise reference.error
        return reference.value

    def wait(self, references, num_returns, timeout):
        self.on_wait()
        for reference in references:
            if reference.look():
                return [reference], [other for other in references if other is not reference]
        return [], references

    def remote(self, kind):
        def options(**given):
            def start(*args):
                self.handles.append(Handle(self, kind, given, args))
                return self.handles[-1]

            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)

    def kill(self, handle):
        self.killed.append(handle)
