"""Training batches in the forms that other trainers read."""
