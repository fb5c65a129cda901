"""Scheduling: the order of the steps of one engine."""
