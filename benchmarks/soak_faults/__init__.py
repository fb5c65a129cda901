"""Rollouts under faults of the machine, one of them at a time, and what is there after each."""
