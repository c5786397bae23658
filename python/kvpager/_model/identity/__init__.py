"""Identifies a model: digests of what it is and does, and checks that it has not changed."""
