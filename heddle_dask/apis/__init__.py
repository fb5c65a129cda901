"""Calls of APIs over HTTP for tools and rewards."""
