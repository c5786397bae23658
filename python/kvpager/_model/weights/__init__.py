"""The weights of a model: which kinds are supported, what they consist of, and their digests."""
