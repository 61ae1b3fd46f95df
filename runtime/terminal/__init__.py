"""Output of all commands, and the options that they share."""
