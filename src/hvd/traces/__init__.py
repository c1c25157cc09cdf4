"""Traces: what requests did, written to and read from Parquet."""
