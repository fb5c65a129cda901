"""A reward model for the shipped agent: it reads a finished conversation and says whether the task is solved."""
