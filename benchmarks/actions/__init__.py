"""Measurements of tool and reward calls on shared pools: ``python -m benchmarks actions``."""
