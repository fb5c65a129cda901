"""Which waiting actions start, where, and with how many units."""
