"""One conversation: its tokens, how far its caches have come, and what is known of both."""
