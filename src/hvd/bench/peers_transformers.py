"""Hugging Face transformers on PyTorch: greedy, and its prompt lookup. GGUF files are read by its own reader."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from time import perf_counter
from typing import Any

from hvd.bench.peers import MissingPeerError, PeerAnswer, PeerMethod, PeerSetup, cut_at_stop

METHODS = ("transformers", "transformers-lookup")
LOOKUP_TOKENS = 10
"""Draft length of its prompt lookup: the one its documentation shows."""


def open_methods(setup: PeerSetup, wanted: Sequence[str]) -> tuple[list[PeerMethod], dict[str, str]]:
    """See `hvd.bench.peers.open_peers`. MissingPeerError when it is not there, or can't load the model."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingPeerError(f"transformers on PyTorch can't be imported ({error})") from error
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    path = Path(setup.model)
    gguf = {"gguf_file": path.name} if path.is_file() else {}
    where = str(path.parent) if gguf else setup.model
    try:
        with redirect_stderr(StringIO()):  # progress bars
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(where, dtype="auto", **gguf)
    except Exception as error:  # whatever it can't load, it is missing, and the run goes on
        raise MissingPeerError(f"transformers can't load {setup.model} ({_line(error)})") from error
    device = setup.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16).eval()
    model.generation_config = transformers.GenerationConfig()  # a checkpoint's own may ask for sampling or penalties
    return [Transformers(name, model, setup) for name in wanted], {}


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Transformers(PeerMethod):
    """`generate` of one loaded model; the methods share it. float32 on a CPU, bfloat16 on a GPU."""

    peer = "transformers"
    how = "wall clock between the first and the last batch of tokens that generate() hands to a streamer"

    def __init__(self, name: str, model: Any, setup: PeerSetup) -> None:
        self.name = name
        self._model = model
        self._setup = setup

    def decode(self, prompt: Sequence[int], max_tokens: int) -> PeerAnswer:
        """See `PeerMethod.decode`."""
        import torch
        from transformers import GenerationConfig

        ids = torch.tensor([list(prompt)], device=self._model.device)
        config = GenerationConfig(
            max_new_tokens=min(max_tokens, self._setup.context - len(prompt)),
            do_sample=False,
            eos_token_id=list(self._setup.stop_ids) or None,
            pad_token_id=self._setup.stop_ids[0] if self._setup.stop_ids else 0,
            prompt_lookup_num_tokens=LOOKUP_TOKENS if self.name.endswith("-lookup") else None,
        )
        clock = _Clock()
        started = perf_counter()
        with torch.inference_mode():
            self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock)
        ended = perf_counter()
        tokens, reason = cut_at_stop(clock.tokens, self._setup.stop_ids)
        first, last = (clock.times[0], clock.times[-1]) if clock.times else (ended, ended)
        decoded = max(0, len(tokens) - clock.first)
        return PeerAnswer(tokens, decoded, last - first, first - started, ended - started, reason)


class _Clock:
    """A streamer that notes when tokens came. `put` is first called with the prompt."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.first = 0
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        """Called by `generate` with ids, in batches as they are committed."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(perf_counter())
        self.tokens += value.reshape(-1).tolist()
        self.first = self.first or len(self.tokens)

    def end(self) -> None:
        """Called by `generate` at the end."""
