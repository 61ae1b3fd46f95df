"""Chooses a tau for a task, with evidence for its quality."""
