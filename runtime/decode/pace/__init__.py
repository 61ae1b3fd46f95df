"""What a step should feed: proposals, their chances, the cost of a step, and the policy that weighs them."""
