"""Groups of attempts as a stream."""
