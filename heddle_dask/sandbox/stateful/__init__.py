"""Sandboxes that keep their files between commands."""
