"""The pictures of the documentation: one message each, made from what the questions wrote."""
