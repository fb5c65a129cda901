"""RollArt's evaluation in virtual time: ``python -m benchmarks rollart``."""
