"""What a person sees of a run: pure folds of events and records into figures, for page, report and terminal."""
