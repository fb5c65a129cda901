"""Held-out reward over tokens and seconds: sync, async, and with prefix sampling: ``python -m benchmarks learning``."""
