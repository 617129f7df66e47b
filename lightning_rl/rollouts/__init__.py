"""Training data: rollouts, batches, sequences, episodes and replay memories."""
