"""What algorithms learn from: rollouts, batches, sequences, episodes and replay memories."""
