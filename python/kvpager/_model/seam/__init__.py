"""The seam to transformers: runs an unmodified causal LM with attention over chunks."""
