"""Encoders: observation space in, feature vector out."""
