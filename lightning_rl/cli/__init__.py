"""The command line. This module imports nothing, so that misspelled commands are answered at once."""

COMMANDS = {
    "fit": "Train.",
    "validate": "Play validation episodes with the policy of a checkpoint.",
    "test": "Play test episodes with the policy of a checkpoint.",
    "predict": "Play episodes with the policy of a checkpoint, and print or record each.",
    "export": "Write the policy of a checkpoint as programs that act without this package.",
    "plot": "Draw learning curves and comparisons of runs from their TensorBoard or CSV logs.",
    "pull": "Fetch a checkpoint from the Hugging Face Hub.",
    "push": "Put a checkpoint, its configuration, score and model card on the Hugging Face Hub.",
}
"""Summary of each command; the first four run a Trainer."""
TRAINER_COMMANDS = ("fit", "validate", "test", "predict")
