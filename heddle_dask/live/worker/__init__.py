"""Worker side: LLM steps on an engine, and actions. Imports neither the driver nor the scheduler."""
