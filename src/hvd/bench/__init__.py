"""Measures policies beside each other on one model, and adds up what came out. Prints nothing."""
