"""Breaks the code on purpose, one promise at a time, and expects named tests to fail."""
