"""`hvd demo`: three prompts, decoded plainly and with Hybrid Verified Decoding, to watch."""

from hvd.cli.demo.command import demo

__all__ = ["demo"]
