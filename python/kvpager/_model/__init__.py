"""What a model is: weights, identity, the seam to transformers, the proof of its row counts."""
