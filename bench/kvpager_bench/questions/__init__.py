"""One module per question; each runs alone, as `python -m`, in a process of its own."""
