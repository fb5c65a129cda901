"""Predictors of remaining work. Pure: no clock, no global state, randomness only from a seed."""
