"""Predictors of remaining work. Pure: no clock, no global state, chance only from a seed."""
