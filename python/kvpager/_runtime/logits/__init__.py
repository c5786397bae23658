"""Changes of logits before a token is chosen from them, and checks of their options."""
