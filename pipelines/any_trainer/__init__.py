"""Training batches for trainers of others, in PyTorch."""
