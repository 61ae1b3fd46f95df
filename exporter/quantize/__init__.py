"""Chooses codes with a calibration text, layer by layer, so that the layers' outputs change least."""
