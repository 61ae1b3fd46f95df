"""Measurements on a machine with a GPU, and the transfer of files to it in pieces."""
