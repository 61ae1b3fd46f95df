"""Whether a written graph says what its checkpoint says."""
