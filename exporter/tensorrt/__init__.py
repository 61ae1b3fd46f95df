"""The step graph -> serialized engines."""
