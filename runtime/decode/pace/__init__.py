"""What a step should feed: proposals, acceptance probabilities, the cost of a step, and the choice."""
