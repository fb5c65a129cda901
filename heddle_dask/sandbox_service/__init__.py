"""Sandboxes behind HTTP: a reference server, and the client that workers use. See ``docs/sandbox.md``."""
