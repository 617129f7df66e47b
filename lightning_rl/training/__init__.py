"""What algorithms share: advantages, losses, optimization, metrics, the clock."""
