"""Runs the model: the rows of a forward, the runner, and what is known of model and pager."""
