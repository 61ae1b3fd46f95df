"""How fast a bundle is here, beside one token at a time."""
