"""Commands beside those of the Trainer: a module each, whose `run` gets the arguments after its name."""

COMMANDS = ("plot",)
