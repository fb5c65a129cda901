"""Logs of other programs as traces: numbers and labels only, no text is kept."""
