"""One file per library that can run a step."""
