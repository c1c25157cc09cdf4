"""The torch backend: the reference in float64 and float32, CUDA in half precision, hidden states for training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd.errors import ConfigError
from hvd.models.checkpoint import Checkpoint
from hvd.models.rope import cos_sin
from hvd.models.spans import ancestor_mask, check_spans, depths
from hvd.models.target import KVCache, Span, SpanOutput, Target, TargetSpec
from hvd.models.torch_decoder import Row, Stretch, TorchDecoder, TorchKVCache, torch
from hvd.types import Float32Array, Int32Array, Int64Array

DTYPES = {"float64": "float64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Number formats by the name that torch gives them; the value is the name in `TargetSpec.weights`."""


class TorchTarget(Target):
    """A target in torch, on the CPU or on a CUDA device.

    In exact arithmetic the logits of a token depend on its prefix alone. In floating point their last bits may also
    depend on the shape of the pass, for other shapes take other kernels: text is reproduced exactly where the
    likeliest tokens lie further apart than that (float64: always but for exact ties).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        aux_layers: Sequence[int] | None = None,
        threads: int | None = None,
    ) -> None:
        """Load the weights.

        device       "cpu", "cuda" or "cuda:1"
        dtype        "float64", "float32", "bfloat16" or "float16": weights, arithmetic and KV cache
        aux_layers   layers whose entering states a pass can return; None = those that EAGLE3 heads take
        threads      CPU threads, for the whole process; None = as torch has it

        Raises ConfigError for a device that is not there or a parameter out of range.
        """
        config = checkpoint.config
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if threads is not None:
            if threads < 1:
                raise ConfigError(f"threads must be at least 1, got {threads}")
            torch.set_num_threads(threads)
        layers = config.aux_layers(aux_layers)
        self.spec = TargetSpec(
            name=checkpoint.name,
            family=config.family,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            context_limit=config.context_limit,
            aux_layers=layers,
            fingerprint=checkpoint.fingerprint,
            backend="torch",
            weights=DTYPES[dtype],
        )
        self.decoder = TorchDecoder(checkpoint, _device(device), getattr(torch, dtype))

    def open(self) -> TorchKVCache:
        """See `Target.open`."""
        return TorchKVCache(self.decoder.config, self.decoder.device, self.decoder.dtype)

    def forward(self, spans: Sequence[Span]) -> list[SpanOutput]:
        """See `Target.forward`."""
        check_spans(spans, self.spec.vocab_size, self.spec.context_limit)
        caches = [self._own(span.cache) for span in spans]
        if not spans:
            return []
        for span, cache in zip(spans, caches, strict=True):
            cache.reserve(len(span.tokens))
        outputs = self._run(spans, caches)
        for span, cache in zip(spans, caches, strict=True):
            cache.pending = len(span.tokens)
        return outputs

    def hidden_states(self, tokens: Int32Array, chunk: int = 1024) -> Float32Array:
        """States entering `spec.aux_layers` along a whole text: int32 [n] -> float32 [n, A*H].

        Raises ValueError as `forward` does.
        """
        cache = self.open()
        states = np.empty((len(tokens), len(self.spec.aux_layers) * self.spec.hidden_size), dtype=np.float32)
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            [output] = self.forward([Span(cache, piece, rows="none", hidden=True)])
            cache.keep(range(len(piece)))
            states[start : start + len(piece)] = output.hidden
        cache.close()
        return states

    @torch.inference_mode()
    def read(self, texts: Sequence[Int32Array]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What training an EAGLE3 head needs of whole texts, in one pass: int32 [n] -> ([n, A*H], [n, H]) each.

        The first are the states entering `spec.aux_layers`; the second those behind the final norm, of which the output
        matrix makes logits. Both on the target's device, in its dtype. Raises ValueError as `forward` does.
        """
        caches = [self.open() for _ in texts]
        spans = [Span(cache, text, rows="none", hidden=True) for cache, text in zip(caches, texts, strict=True)]
        check_spans(spans, self.spec.vocab_size, self.spec.context_limit)
        for text, cache in zip(texts, caches, strict=True):
            cache.reserve(len(text))
        row = self._row(spans, caches)
        states, entering = self.decoder.forward(row, self.spec.aux_layers)
        final, side = self.decoder.normed(states), torch.cat(entering, dim=-1)
        return [(side[part.start : part.end], final[part.start : part.end]) for part in row.stretches]

    def _own(self, cache: KVCache) -> TorchKVCache:
        if not isinstance(cache, TorchKVCache):
            raise TypeError(f"the torch backend needs a cache that it opened itself, got {type(cache).__name__}")
        return cache

    @torch.inference_mode()
    def _run(self, spans: Sequence[Span], caches: Sequence[TorchKVCache]) -> list[SpanOutput]:
        """One pass. All inputs go to the device before it and all results come back behind it, each in one piece."""
        row = self._row(spans, caches)
        wanted = [_logit_rows(span, part) for span, part in zip(spans, row.stretches, strict=True)]
        index = torch.from_numpy(np.concatenate(wanted)).to(self.decoder.device)
        aux_layers = self.spec.aux_layers if any(span.hidden for span in spans) else ()
        states, entering = self.decoder.forward(row, aux_layers)
        logits = _to_numpy(self.decoder.logits(states[index]))
        hidden = _to_numpy(torch.cat(entering, dim=-1)).astype(np.float32, copy=False) if entering else None
        ends = np.cumsum([len(rows) for rows in wanted])
        return [
            SpanOutput(
                logits=logits[end - len(rows) : end],
                hidden=hidden[part.start : part.end] if span.hidden and hidden is not None else None,
            )
            for span, part, rows, end in zip(spans, row.stretches, wanted, ends, strict=True)
        ]

    def _row(self, spans: Sequence[Span], caches: Sequence[TorchKVCache]) -> Row:
        """Lay the spans behind each other."""
        config, device = self.decoder.config, self.decoder.device
        positions = np.concatenate([_positions(span) for span in spans])
        cos, sin = cos_sin(config.rope, config.head_dim, config.context_limit, positions)
        precision = torch.float64 if self.decoder.dtype == torch.float64 else torch.float32
        ends = np.cumsum([len(span.tokens) for span in spans]).tolist()
        return Row(
            tokens=torch.from_numpy(np.concatenate([span.tokens for span in spans]).astype(np.int64)).to(device),
            cos=torch.from_numpy(cos).to(device, precision)[:, None],
            sin=torch.from_numpy(sin).to(device, precision)[:, None],
            stretches=[
                Stretch(cache, end - len(span.tokens), end, *self._mask(span))
                for span, cache, end in zip(spans, caches, ends, strict=True)
            ],
        )

    def _mask(self, span: Span) -> tuple[torch.Tensor | None, bool]:
        """See `Stretch`."""
        n, length, device = len(span.tokens), span.cache.length, self.decoder.device
        if n == 1:
            return None, False
        if span.parents is None:
            return (None, True) if length == 0 else (self._ones(n, length + n).tril(length), False)
        tree = torch.from_numpy(ancestor_mask(span.parents)).to(device)
        return torch.cat((self._ones(n, length), tree), dim=1), False

    def _ones(self, rows: int, columns: int) -> torch.Tensor:
        return torch.ones(rows, columns, dtype=torch.bool, device=self.decoder.device)


def _positions(span: Span) -> Int64Array:
    """int64 [n]"""
    depth = np.arange(len(span.tokens), dtype=np.int64) if span.parents is None else depths(span.parents)
    return span.cache.length + depth


def _logit_rows(span: Span, part: Stretch) -> Int64Array:
    """Places in the row whose logits are wanted."""
    first = {"all": part.start, "last": part.end - 1, "none": part.end}[span.rows]
    return np.arange(first, part.end, dtype=np.int64)


def _to_numpy(values: torch.Tensor) -> Float32Array:
    """Copy to the CPU: float64 stays, everything else becomes float32."""
    wide = values if values.dtype == torch.float64 else values.float()
    array: Float32Array = wide.cpu().numpy()
    return array


def _device(name: str) -> torch.device:
    """The named device, checked to be there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return device
