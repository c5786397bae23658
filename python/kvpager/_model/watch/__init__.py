"""Watches an open engine's model for changes: weights, modules, and what its code reads."""
