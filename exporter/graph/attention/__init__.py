"""The nodes of attention: heads, rotations, and the KV layouts."""
