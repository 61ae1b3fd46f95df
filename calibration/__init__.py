"""task -> tau profile. Uses runtime only."""
