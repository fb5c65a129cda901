"""Attempts that run side by side: their programs, their rewards, their ends."""
