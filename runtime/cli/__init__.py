"""The commands that run bundles."""
