"""Affinity: the engines among which the placement chooses, by class of hardware."""
