"""Environment wrappers, each for a single environment or a vectorized one."""
