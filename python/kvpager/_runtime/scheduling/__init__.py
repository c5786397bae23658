"""Puts rows of many texts into common forwards: prompts, decoding, guesses, damaged chunks."""
