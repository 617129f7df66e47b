"""One thread for every test: the networks are small, and results must not depend on the machine."""

import gc
import logging
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave the modules and the tests out of the collections of garbage, which would search them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)  # frequent collections take a tenth of the time of the tests
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def no_garbage_of_other_files() -> Iterator[None]:
    """Unused objects may refer to threads, which a process that a test forks does not have."""
    yield
    gc.collect()
    gc.freeze()  # what is left are modules and caches; the next collection need not search them again


@pytest.fixture(autouse=True, scope="session")
def autograd_is_used_before_fake_tensors():
    """Otherwise a build of PyTorch for CUDA, on a machine without a GPU, refuses autograd in forked processes."""
    import torch

    torch.ones((), requires_grad=True).backward()


@pytest.fixture(autouse=True)
def one_thread():
    import torch  # not above, since the process that starts the workers of pytest-xdist needs none of this

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_seed_of_another_test():
    """What `seed_everything` leaves behind is taken up by the processes that the next test starts."""
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def lightning_tells_caplog(monkeypatch):
    """Let pytest see what Lightning logs, also after a script that changed the level of the logger."""
    logger = logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "propagate", True)
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def through_autograd(monkeypatch):
    """Have PPO learn through autograd as its subclasses do, to the last bit."""
    from lightning_rl.fast import PPOLoss

    monkeypatch.setattr(PPOLoss, "of", classmethod(lambda *_: "a test wants autograd"))


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    """Work in an empty folder, as a user would: runs are written to the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
