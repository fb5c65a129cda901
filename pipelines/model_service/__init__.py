"""A model service for machines without GPUs: a process that loads a model into memory slots and frees them again."""
