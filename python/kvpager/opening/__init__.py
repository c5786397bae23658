"""What is found out about a model when an engine is opened, or its weights have changed."""
