"""Guesses at what follows, by cheap means, and what the model made of them."""
