"""Hybrid Verified Decoding: lossless speculative decoding that knows, before verifying, whether a draft will pay.

from hvd import LLM, SamplingParams

llm = LLM("SmolLM2-135M-Instruct.Q4_1.gguf")
[answer] = llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=64))
print(answer.text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd.config import Eagle3Config, EngineConfig, SamplingParams, SuffixConfig
from hvd.errors import HVDError

if TYPE_CHECKING:
    from hvd.engine.llm import LLM, Completion, Stream

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Completion",
    "Eagle3Config",
    "EngineConfig",
    "HVDError",
    "SamplingParams",
    "Stream",
    "SuffixConfig",
    "__version__",
]

_LAZY = ("LLM", "Completion", "Stream")


def __getattr__(name: str) -> object:
    """The engine is imported when it is first used: `hvd --help` and readers of traces don't wait for it."""
    if name in _LAZY:
        import hvd.engine.llm as llm

        return getattr(llm, name)
    raise AttributeError(f"module 'hvd' has no attribute {name!r}")
