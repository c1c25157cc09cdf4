"""Verification: the sampler and the walk."""
