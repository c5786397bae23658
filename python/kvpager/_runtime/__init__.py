"""Runs texts through a model: rows, forwards, prompts, generations, and their snapshots."""
