"""Peers that need an environment of their own: installed, found and called here."""
