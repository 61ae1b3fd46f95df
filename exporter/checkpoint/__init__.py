"""Whatever people call a checkpoint, read as dimensions and tensors."""
