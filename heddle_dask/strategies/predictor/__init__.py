"""Options of the predictor that a session runs."""
