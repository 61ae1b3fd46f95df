"""Text to token ids and back: chat templates, special tokens, growing text, thinking and tool calls."""
