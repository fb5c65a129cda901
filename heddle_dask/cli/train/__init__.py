"""``heddle train``."""
