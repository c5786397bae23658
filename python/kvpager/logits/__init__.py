"""What is done to logits before a token is chosen from them, and checks of what asks for it."""
