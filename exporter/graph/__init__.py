"""Dimensions and tensors -> the step graph."""
