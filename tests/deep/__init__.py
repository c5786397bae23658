"""Tests too long for every change: `make test-deep`. See docs/testing.md."""
