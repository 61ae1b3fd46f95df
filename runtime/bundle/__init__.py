"""What lies on disk: the manifest and the files it vouches for. Knows no device and no tokens."""
