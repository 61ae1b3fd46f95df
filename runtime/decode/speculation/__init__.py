"""Chooses the slots of a step: draft tokens, acceptance probabilities, the cost of a step, and the choice."""
