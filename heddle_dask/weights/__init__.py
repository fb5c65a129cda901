"""Weights on their way from a trainer to engines: manifests, buckets, stores, checks."""
