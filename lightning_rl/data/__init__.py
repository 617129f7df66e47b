"""From a policy and environments to rollouts and episodes."""
