"""Target models and the EAGLE3 head."""
