"""Bundles made hostile at random, opened and asked, by the hundred thousand."""
