"""What is needed where there is a GPU: carried there in pieces, and measured there."""
