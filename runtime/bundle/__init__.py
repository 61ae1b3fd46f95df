"""Bundles on disk: the manifest, the files it lists, and how both are replaced."""
