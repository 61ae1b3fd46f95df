"""Prompt in, tokens out: the loop, its rows, its policy. Speaks token ids only."""
