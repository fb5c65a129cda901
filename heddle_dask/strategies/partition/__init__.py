"""Which trajectory starts on which engine, decided for all of them at once: pure functions of plain numbers."""
