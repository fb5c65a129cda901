"""The bias of redundancy towards short trajectories: ``python -m benchmarks redundancy``."""
