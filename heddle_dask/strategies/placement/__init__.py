"""Placement: the engine of a step."""
