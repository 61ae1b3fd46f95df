"""Runs bundles with numpy and one backend library; it never imports torch."""
