"""A full disk while TensorBoard writes raises one error that names the file."""

from __future__ import annotations

import errno
import re

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.summary.writer.record_writer import RecordWriter

from lightning_rl.checkpointing.atomic import LogFailure
from lightning_rl.cli.main import main
from lightning_rl.cli.parser import error_message
from tests.cli.test_main import SMALL
from tests.helpers import make_data, make_model, make_trainer

MESSAGE = r"log '.*events\.out\.tfevents\.[^']*' could not be written: No space left on device\. Free some space"

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


def fill_disk(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Make a method of the file fail from the fourth call on, or when the file is closed."""
    original, calls = getattr(RecordWriter, method), []

    def fail(writer, *args):
        calls.append(args)
        if len(calls) > 3 or method == "close":
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(writer, *args)

    monkeypatch.setattr(RecordWriter, method, fail)


@pytest.mark.parametrize("method", ["write", "flush", "close"])
def test_command_line_ends_with_one_line_that_names_the_event_file(method, capsys, in_tmp_path, monkeypatch):
    fill_disk(monkeypatch, method)
    with pytest.raises(SystemExit) as ended:
        main(["fit", *SMALL, "--trainer.max_epochs=4", "--trainer.log_every_n_steps=1"])
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert len(re.findall(f"lightning-rl: error: {MESSAGE}", err)) == 1
    assert "Traceback" not in err and err.count("No space left") == 1


@pytest.mark.parametrize("method", ["write", "flush"])
def test_trainer_raises_one_error_that_names_the_event_file(method, tmp_path, monkeypatch):
    fill_disk(monkeypatch, method)
    data = make_data(rollouts_per_epoch=10)
    with pytest.raises(LogFailure, match=MESSAGE) as caught:
        make_trainer(logger=TensorBoardLogger(tmp_path), log_every_n_steps=1).fit(make_model(data), data)
    assert isinstance(caught.value.__cause__, OSError)


def test_log_failure_is_raised_in_second_fit_with_same_logger(tmp_path, monkeypatch):
    data, logger = make_data(), TensorBoardLogger(tmp_path)
    model = make_model(data)
    make_trainer(logger=logger).fit(model, data)
    fill_disk(monkeypatch, "write")
    with pytest.raises(LogFailure, match=MESSAGE):
        make_trainer(logger=logger, max_epochs=9, log_every_n_steps=1).fit(model, data)


def test_error_message_handles_circular_exception_context():
    """A logger raises the same exception again while it is handled."""
    one, other = ValueError("one"), OSError("other")
    one.__context__, other.__context__ = other, one
    assert error_message(one) is None
