"""Bodies of requests and answers. Unknown fields are refused, never ignored."""
