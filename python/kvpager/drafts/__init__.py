"""A draft model, which guesses for all texts of an engine."""
