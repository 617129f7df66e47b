"""Run by `test_processes`: a learner with two actors, which tells their processes and then learns until it is stopped.

python -m tests.data.learner_script
"""

import faulthandler
import signal

import torch
from lightning.pytorch import Callback

from lightning_rl import IMPALA
from tests.helpers import make_data, make_trainer


class Tell(Callback):
    """Prints the actor processes, and a traceback if this process is still running much later."""

    def __init__(self, data):
        self.data = data

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == 2:
            faulthandler.dump_traceback_later(50)
            print(*(process.pid for process in self.data._source._processes), flush=True)


def main():
    # Shells and queues start background programs with SIGINT ignored, which this process would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    data = make_data(actors={"count": 2, "start_method": "fork"}, rollouts_per_epoch=1000)
    model = IMPALA(data.observation_space, data.action_space, policy={"hidden_sizes": (8,)})
    make_trainer(max_epochs=-1, callbacks=[Tell(data)]).fit(model, data)


if __name__ == "__main__":
    main()
