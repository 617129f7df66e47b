"""`python -m lightning_rl` is `lightning-rl`."""

import torch

from lightning_rl.cli import main


def run() -> None:
    """Run the command line of this process; what is returned here would be its exit status."""
    main()
    # The Trainer leaves the group of ranks open, and a process that ends so is now and then aborted by PyTorch.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run()
