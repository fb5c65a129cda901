"""The history of a live session, folded from events and commands, and pictures of it."""
