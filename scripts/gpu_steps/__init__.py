"""The steps of scripts/gpu.py."""
