"""Scheduler side: the plugin, its session, predictions, and the deployment of engines."""
