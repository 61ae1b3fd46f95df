"""The form of answers in each API."""
