"""Preemption: which running step makes room for a waiting one."""
