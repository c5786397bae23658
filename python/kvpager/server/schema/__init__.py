"""Bodies of requests and answers. A field that nobody knows is refused, never ignored."""
