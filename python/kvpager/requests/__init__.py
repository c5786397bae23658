"""Requests that end independently: the scheduler, its requests, their completions."""
