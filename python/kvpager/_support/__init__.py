"""Helpers that know nothing of models or texts."""
