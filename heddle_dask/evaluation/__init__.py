"""Evaluation: how attempts ended, what that says of an agent or a model, and how two of them compare."""
