"""`python -m lightning_rl` is `lightning-rl`."""

from lightning_rl.cli import main

if __name__ == "__main__":
    main()
