"""Finds out a model's properties when an engine opens or the weights have changed."""
