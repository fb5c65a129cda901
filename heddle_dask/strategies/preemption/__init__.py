"""Preemption: which running step is stopped for a waiting one."""
