"""Task rows: prompts, and how to judge their answers."""
