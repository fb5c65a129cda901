"""Model services: reward models, judges and teachers that are loaded on demand and share devices."""
