"""A session on a cluster, and its engines."""
