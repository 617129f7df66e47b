"""What goes wrong in environments."""


class EnvironmentFailure(RuntimeError):
    """An environment raised, died, hung or returned what cannot be learned from; the message says which and when."""
