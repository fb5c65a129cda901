"""Measurements of tool and reward calls on shared pools: ``heddle bench actions``."""
