"""Admission: which waiting trajectories start, and on which engine."""
