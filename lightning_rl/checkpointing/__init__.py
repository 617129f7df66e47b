"""What a checkpoint holds, how runs resume, and how they end early without losing data."""
