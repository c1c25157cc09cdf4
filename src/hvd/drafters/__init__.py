"""Makers of drafts."""
