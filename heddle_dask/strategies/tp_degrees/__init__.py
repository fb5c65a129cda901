"""Planning of the TP degrees of the engines of the next rollout."""
