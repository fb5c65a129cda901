"""Which TP degrees the engines of the next rollout get."""
