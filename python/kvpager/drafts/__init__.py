"""A draft model that guesses tokens for all texts of an engine."""
