"""Finds the row counts whose bits equal those of M rows, by experiments on parts of the model."""
