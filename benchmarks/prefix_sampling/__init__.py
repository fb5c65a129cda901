"""Tokens and seconds to a held-out score, with and without prefix sampling: ``python -m benchmarks prefix``."""
