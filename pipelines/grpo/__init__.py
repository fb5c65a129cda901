"""A trainer for groups of trajectories, in plain PyTorch: group-relative advantages, decoupled clipped loss."""
