"""The architecture of a decoder, from config.json: dimensions, families, rotation, names of tensors."""
