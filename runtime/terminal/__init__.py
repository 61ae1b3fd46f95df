"""What all commands print with, and the options that they share."""
