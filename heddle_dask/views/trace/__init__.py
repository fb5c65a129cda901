"""A stored run for other tools: Perfetto traces, OpenTelemetry spans."""
