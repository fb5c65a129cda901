"""Clusters that start all processes of a rollout."""
