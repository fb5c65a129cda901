"""The bias of redundancy towards short trajectories: ``heddle bench redundancy``."""
