"""Training in virtual time: trainer, weight updates, bounded staleness, redundancy, resets of environments."""
