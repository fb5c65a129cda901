"""What a user gives a rollout, checked."""
