"""What the driver sends to the cluster and hears from it: capacity, submissions, notices."""
