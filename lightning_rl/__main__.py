"""`python -m lightning_rl` is `lightning-rl`."""

from lightning_rl.cli import main


def run() -> None:
    """Run the command line of this process; what is returned here would be its exit status."""
    main()


if __name__ == "__main__":
    run()
