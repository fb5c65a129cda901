"""``heddle eval``."""
