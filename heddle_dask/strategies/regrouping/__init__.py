"""Regrouping inside a rollout: when merging engines for the tail is worth its price."""
