"""Many prompts with an end of their own: the scheduler, its requests, their completions."""
