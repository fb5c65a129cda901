"""Predictor: which predictor a session runs."""
