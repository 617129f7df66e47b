"""Progress bars that count environment steps."""

from lightning.pytorch.callbacks import TQDMProgressBar


class EnvStepProgressBar(TQDMProgressBar):
    pass
