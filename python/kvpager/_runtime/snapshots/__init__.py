"""Texts frozen, saved and restored, with what other models hold of them."""
