"""What `scripts/quantisation.py` tries, and how."""
