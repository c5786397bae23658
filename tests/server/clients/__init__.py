"""Clients that others wrote, each with a script that runs in an environment of its own."""
