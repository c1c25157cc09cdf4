"""vLLM through its offline `LLM` class: no speculation, n-gram, suffix and EAGLE3.

Written against the V1 engine of vLLM 0.32. Each method is an engine of its own; together they get most of a GPU's
memory in equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from hvd.bench.peers import MissingPeerError, PeerAnswer, PeerMethod, PeerSetup

METHODS = ("vllm", "vllm-ngram", "vllm-suffix", "vllm-eagle3")
MEMORY = 0.8
"""Share of a GPU's memory for all methods together."""

SPECULATION: dict[str, dict[str, Any] | None] = {
    "vllm": None,
    "vllm-ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "vllm-suffix": {"method": "suffix", "num_speculative_tokens": 32},
    "vllm-eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
}


def open_methods(setup: PeerSetup, wanted: Sequence[str]) -> tuple[list[PeerMethod], dict[str, str]]:
    """See `hvd.bench.peers.open_peers`. MissingPeerError without vLLM, or when it has no reader for the model."""
    try:
        import vllm
    except ImportError as error:
        raise MissingPeerError(f"vLLM can't be imported ({error})") from error
    if Path(setup.model).is_file():
        raise MissingPeerError("vLLM reads no GGUF files; give --model a Hugging Face directory or hub id")
    missing = {}
    if "vllm-eagle3" in wanted and setup.eagle3 is None:
        missing["vllm-eagle3"] = "it needs a head; give one with --eagle3"
    if "vllm-suffix" in wanted and find_spec("arctic_inference") is None:
        missing["vllm-suffix"] = "it needs arctic-inference; pip install --no-deps arctic-inference"
    names = [name for name in wanted if name not in missing]
    methods: list[PeerMethod] = []
    for name in names:
        try:
            methods.append(Vllm(name, vllm.LLM(**engine_options(name, setup, len(names))), setup))
        except Exception as error:  # noqa: BLE001 - whatever keeps it from starting, it is missing, and the run goes on
            missing[name] = f"vLLM can't start ({_line(error)})"
    return methods, missing


def engine_options(name: str, setup: PeerSetup, engines: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for one method beside others. Statistics are on, for the time of the first token."""
    from vllm.platforms import current_platform

    speculation = SPECULATION[name]
    if speculation is not None and name == "vllm-eagle3":
        speculation = {**speculation, "model": setup.eagle3}
    return {
        "model": setup.model,
        "dtype": "float32" if current_platform.is_cpu() else "auto",
        "skip_tokenizer_init": True,
        "speculative_config": speculation,
        "max_model_len": setup.context,
        "max_num_seqs": 1,
        "gpu_memory_utilization": MEMORY / engines,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }


def _line(error: Exception) -> str:
    """The first line that says something: pydantic's first one only counts its errors."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[1 if len(lines) > 1 and " validation error" in lines[0] else 0] if lines else type(error).__name__


class Vllm(PeerMethod):
    """One vLLM engine."""

    peer = "vllm"
    how = "vLLM's own time between its first and its last token (RequestOutput.metrics); up to the first is prefill"

    def __init__(self, name: str, llm: Any, setup: PeerSetup) -> None:
        self.name = name
        self._llm = llm
        self._setup = setup

    def decode(self, prompt: Sequence[int], max_tokens: int) -> PeerAnswer:
        """See `PeerMethod.decode`."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=min(max_tokens, self._setup.context - len(prompt)),
            stop_token_ids=list(self._setup.stop_ids),
            ignore_eos=True,  # the checkpoint's own: those above are all that end an answer
            detokenize=False,
        )
        started = perf_counter()
        [result] = self._llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        wall = perf_counter() - started
        answer, metrics = result.outputs[0], result.metrics
        tokens = list(answer.token_ids)
        decoding = metrics.last_token_ts - metrics.first_token_ts
        return PeerAnswer(
            tokens=tokens,
            decoded=max(0, len(tokens) - 1),
            decode_seconds=decoding,
            prefill_seconds=metrics.first_token_ts - metrics.scheduled_ts,
            wall_seconds=wall,
            finish_reason="stop" if answer.finish_reason == "stop" else "length",
        )
