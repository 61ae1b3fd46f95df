"""Rows with prompts and what a good answer is."""
