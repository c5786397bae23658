"""A transformers `Cache` whose keys and values live in a pager."""
