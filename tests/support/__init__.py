"""What the tests share: fakes, the oracle, tiny checkpoints, nasty texts."""
