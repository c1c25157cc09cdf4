"""Trains an EAGLE3 head for any target: text, hidden states, training, export. Each stage is kept and resumed.

OUT/text/…        the target's own answers, as traces
OUT/states/…      its hidden states along them
OUT/checkpoint.pt where training is
OUT/head/         the finished head
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvd.config import SamplingParams
from hvd.engine.llm import LLM
from hvd.errors import ConfigError, TrainingError
from hvd.models.checkpoint import Checkpoint
from hvd.models.eagle3_tensors import HeadSpec
from hvd.models.torch_target import TorchTarget
from hvd.traces.prompts import Prompt
from hvd.traces.schema import Trace
from hvd.training.eagle3.answers import Note, Progress, recorded_answers, target_answers
from hvd.training.eagle3.export import write_head
from hvd.training.eagle3.fit import Fit, FitOptions, Point
from hvd.training.eagle3.module import HeadModule
from hvd.training.eagle3.states import StateStore
from hvd.training.eagle3.text import Document, coverage, documents_of, draft_vocabulary, hold_out
from hvd.types import Int64Array

LAYER_TENSORS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """What a head is trained on, and how large it is.

    max_tokens      longest answer to generate
    temperatures    the target answers every prompt once at each of these
    recorded        learn from recorded answers too
    vocab           entries of the draft vocabulary
    intermediate    size of the head's MLP; None = the target's
    hold_out        share of the prompts' groups that are not trained on
    states_bytes    most bytes of hidden states kept on the disk; what is beyond is computed anew each epoch
    from_target     begin as the target's last layer (True), or at random
    """

    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.8)
    recorded: bool = False
    vocab: int = 8192
    intermediate: int | None = None
    hold_out: float = 0.05
    states_bytes: int = 20 * 10**9
    from_target: bool = True
    fit: FitOptions = field(default_factory=FitOptions)

    def __post_init__(self) -> None:
        if not 0 < self.hold_out < 1:
            raise ConfigError(f"the share to hold out must lie between 0 and 1, got {self.hold_out}")
        if self.vocab < 2:
            raise ConfigError(f"the draft vocabulary needs at least 2 entries, got {self.vocab}")


@dataclass(frozen=True, slots=True)
class Trained:
    """What came out: where the head lies, its curve, facts of the text."""

    folder: Path
    curve: list[Point]
    text: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"head": str(self.folder), "text": self.text, "curve": [asdict(point) for point in self.curve]}


def write_text(
    llm: LLM, prompts: Sequence[Prompt], out: Path, options: Eagle3Options, progress: Progress, note: Note
) -> list[Trace]:
    """The answers to learn from, kept under `out`/text: one round for each temperature, then recorded ones if wanted.

    Hold `only_run(out)` around it.
    """
    length = min(options.fit.length, llm.target.spec.context_limit)
    found = []
    for temperature in options.temperatures:
        params = SamplingParams(
            max_tokens=options.max_tokens, temperature=temperature, seed=options.fit.seed if temperature else None
        )
        found += target_answers(llm, prompts, out / "text", params, length, progress, note)
    if options.recorded and llm.tokenizer is not None:
        found += recorded_answers(llm.tokenizer, prompts, out / "text", length, progress, note)
    return found


def train_eagle3(
    checkpoint: Checkpoint,
    target: TorchTarget,
    text: Iterable[Trace],
    out: Path,
    options: Eagle3Options,
    progress: Progress = lambda what, done, total: None,
    note: Note = lambda line: None,
) -> Trained:
    """Train a head for `target`, loaded from `checkpoint`, on traces, and write it to `out`/head.

    text   traces; answers of the target itself are the best text

    Everything under `out` that fits is used again; hold `only_run(out)` around it. Raises TrainingError.
    """
    documents = documents_of(_checked(text, target, note), min(options.fit.length, target.spec.context_limit))
    train, held = hold_out(documents, options.hold_out, options.fit.seed)
    if not train or not held:
        raise TrainingError(
            f"nothing to learn from: {len(documents)} usable answers to {len({d.group for d in documents})} prompts; "
            "at least two prompts are needed, one of them to hold out, shorter than --length with their answers"
        )
    draft_ids = draft_vocabulary(train, options.vocab, target.spec.vocab_size)
    facts = _facts(documents, held, draft_ids)
    note(
        f"{facts['documents']} documents, {facts['answer_tokens']} answer tokens of {facts['tokens']}; "
        f"{facts['held_documents']} held out; the draft vocabulary covers {facts['coverage']:.1%} of their answers"
    )
    head = new_head(checkpoint, target, draft_ids, options)
    stores = _states(target, train, held, out / "states", options, progress, note)
    args = _training_args(target, options, facts)
    made_of = ("vocab", "intermediate", "from_target", "hold_out")
    settings = {
        **{key: value for key, value in args.items() if key not in ("options", "text")},
        **{name: getattr(options, name) for name in made_of},
        "text": facts["digest"],
    }
    fit = Fit(head, (stores[0], train), (stores[1], held), out / "checkpoint.pt", options.fit, settings)
    fit.run(progress)
    write_head(out / "head", head, draft_ids, target.spec, args, fit.curve)
    return Trained(out / "head", fit.curve, facts)


def new_head(checkpoint: Checkpoint, target: TorchTarget, draft_ids: Int64Array, options: Eagle3Options) -> HeadModule:
    """An untrained head on the target's device; every target that loads will do."""
    config, spec = checkpoint.config, target.spec
    shape = HeadSpec(
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        aux_layers=spec.aux_layers,
        num_layers=1,
        norm_before_residual=False,
        norm_output=False,
        intermediate_size=options.intermediate or config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        context_limit=config.context_limit,
        rope=config.rope,
        draft_vocab_size=len(draft_ids),
    )
    device = target.decoder.device
    torch.manual_seed(options.fit.seed)
    embedding, output = target.decoder.embedding.float(), target.decoder.head.float()
    head = HeadModule(shape, embedding, output, torch.from_numpy(draft_ids).to(device), options.fit.length).to(device)
    if options.from_target:
        prefix = f"model.layers.{config.num_layers - 1}."
        tensors = {name: torch.tensor(checkpoint.tensor(f"{prefix}{name}.weight")).float() for name in LAYER_TENSORS}
        tensors["norm"] = torch.tensor(checkpoint.tensor("model.norm.weight")).float()
        head.initialize({f"{name}.weight": tensor.to(device) for name, tensor in tensors.items()})
    return head


def _checked(text: Iterable[Trace], target: TorchTarget, note: Note) -> Iterator[Trace]:
    """Traces in a fixed order, checked to be in the target's tokens. A note when other models wrote some of them."""
    traces = sorted(text, key=lambda trace: (trace.id, trace.sampling))
    foreign = sum(trace.model_fingerprint != target.spec.fingerprint for trace in traces)
    if foreign:
        note(f"{foreign} of {len(traces)} answers were not written by this target; its own teach a head more")
    for trace in traces:
        largest = max((int(part.max()) for part in (trace.prompt, trace.response) if len(part)), default=0)
        if largest >= target.spec.vocab_size:
            raise TrainingError(
                f"trace {trace.id} holds token {largest}, beyond the target's vocabulary of {target.spec.vocab_size}; "
                "it was made with another tokenizer"
            )
        yield trace


def _states(
    target: TorchTarget,
    train: Sequence[Document],
    held: Sequence[Document],
    folder: Path,
    options: Eagle3Options,
    progress: Progress,
    note: Note,
) -> tuple[StateStore, StateStore]:
    """Stores of both parts, computed. The held-out part is small and comes first."""
    kept = StateStore(target, held, folder, options.states_bytes)
    bulk = StateStore(target, train, folder, options.states_bytes - kept.bytes)
    for store in (kept, bulk):
        store.compute(lambda done, total: progress("hidden states", done, total))
    if bulk.stored < 1:
        note(f"{1 - bulk.stored:.0%} of the hidden states pass the bound and are computed anew each epoch")
    return bulk, kept


def _facts(documents: Sequence[Document], held: Sequence[Document], draft_ids: Int64Array) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    for document in documents:
        digest.update(document.tokens.tobytes() + document.answer.to_bytes(4, "big"))
    return {
        "documents": len(documents),
        "held_documents": len(held),
        "tokens": int(np.sum([len(document.tokens) for document in documents])),
        "answer_tokens": int(np.sum([document.counts.sum() for document in documents])),
        "datasets": dict(Counter(document.dataset for document in documents)),
        "coverage": coverage(held, draft_ids),
        "digest": digest.hexdigest(),
    }


def _training_args(target: TorchTarget, options: Eagle3Options, facts: dict[str, Any]) -> dict[str, Any]:
    from hvd import __version__

    spec = target.spec
    return {
        "hvd": __version__,
        "torch": str(torch.__version__),
        "target": {"name": spec.name, "fingerprint": spec.fingerprint, "aux_layers": list(spec.aux_layers)},
        "device": str(target.decoder.device),
        "dtype": spec.weights,
        "text": facts,
        "options": {key: value for key, value in asdict(options).items() if key != "fit"} | asdict(options.fit),
    }
