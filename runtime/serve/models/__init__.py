"""The models of a server: open or not, each with its batcher and its level of tau."""
