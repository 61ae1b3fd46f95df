"""Codes chosen with a calibration text, layer by layer, so that what the layers compute changes least."""
