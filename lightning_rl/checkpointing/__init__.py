"""Checkpoints: contents, resuming, interruption, run folders."""
