"""Cheap guesses of the next tokens, and records of how many the model accepted."""
