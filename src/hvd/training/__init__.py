"""Training and replay on traces: states, labels, predictors, simulated policies."""
