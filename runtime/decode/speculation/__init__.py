"""What a step should feed: draft tokens, acceptance probabilities, the cost of a step, and the choice."""
