"""Client side: the public API, agent programs, submission of their steps and actions, and the run's files."""
