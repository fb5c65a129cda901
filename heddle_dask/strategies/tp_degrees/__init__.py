"""Which model-parallel degrees the engines of the next rollout get."""
