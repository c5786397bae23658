"""What kvpager does with every text architecture of the installed transformers."""
