"""Which tau a task bears, with evidence."""
