"""`kvpager demo`: a long prompt, turns in separate processes, proof that no bit differs."""
