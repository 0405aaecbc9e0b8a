"""Parameter-holding ops that models are made of."""
