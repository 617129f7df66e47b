"""From observations to action distributions and values."""
