"""The page of one request: its text coloured by arm, every cycle's decision behind it (assets/explain.js draws it)."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from hvd.payoff.explanation import Prospect
from hvd.report.explain import ExplainedCycle, ExplainedRequest, accepted_nodes, lengths_shown
from hvd.report.page import page, visible
from hvd.types import Arm, Draft, Float64Array, Int32Array

ARMS = (Arm.CACHE, Arm.EAGLE3, Arm.PLAIN)
NAMES = {Arm.CACHE: "suffix cache", Arm.EAGLE3: "EAGLE3 head", Arm.PLAIN: "the model itself"}

_SHOWN: tuple[tuple[str, str, Callable[[float], float]], ...] = (
    ("hits_8", "cache right at the last 8 tokens", float),
    ("hits_32", "at the last 32", float),
    ("hit_run", "right in a row up to now", math.expm1),
    ("cache_rate", "recent cycles that took the cache", float),
    ("accepted_mean", "accepted a cycle, recently", math.expm1),
    ("cache_accept_ratio", "of its tokens accepted, recently", float),
    ("prob_mean", "mean probability in the trie", float),
    ("product_4", "trie alone: first 4 right", float),
    ("product_16", "trie alone: first 16 right", float),
    ("single_share", "of the draft seen only once", float),
)
"""Features on the page: name, what it says, how to read it. (`--json` has all of them.)"""

_AHEAD = 16
"""Draft tokens shown behind those that were verified."""

_LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"


class _Texts:
    """Every text once; the page's data name it by number. A long answer repeats itself a lot."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of a text, made visible."""
        return self._numbers.setdefault(visible(text), len(self._numbers))

    def numbers(self, texts: Sequence[str]) -> list[int]:
        """Their numbers."""
        return [self.number(text) for text in texts]

    def all(self) -> list[str]:
        """The texts in order of their numbers."""
        return list(self._numbers)


def explain_page(request: ExplainedRequest, title: str = "") -> str:
    """The whole page. `title`: what the request is about, e.g. the beginning of its prompt."""
    texts = _Texts()
    data = {
        "prompt": texts.numbers(request.texts(request.prompt)),
        "output": texts.numbers(request.texts(request.output, request.prompt)),
        "features": [label for _, label, _ in _SHOWN],
        "cycles": [_cycle(request, cycle, texts) for cycle in request.cycles],
        "replayed": request.replayed,
        "texts": texts.all(),
    }
    return page(
        f"Why this draft? {title}".strip(),
        _body(request, title),
        assets=("base.css", "explain.css", "base.js", "explain.js"),
        data=data,
    )


def _cycle(request: ExplainedRequest, cycle: ExplainedCycle, texts: _Texts) -> dict[str, Any]:
    """One cycle in short keys: a long answer has thousands. explain.js says what each means."""
    record, why = cycle.record, cycle.explanation
    before = request.text_at(record.position)
    out: dict[str, Any] = {
        "p": record.position,
        "a": ARMS.index(record.arm),
        "n": record.drafted,
        "k": record.accepted,
        "m": record.committed,
        "r": texts.number(record.reason),
        "pl": _short(why.plain_seconds * 1e3),
        "w": [_prospect(each, record.drafted) for each in why.prospects],
    }
    if cycle.cache is not None:
        out["c"] = _offer(request, cycle, cycle.cache, before, texts)
    if why.features:
        out["f"] = [_short(read(why.features[name])) for name, _, read in _SHOWN]
    if cycle.source is not None:
        out["s"] = [cycle.source.start, cycle.source.length]
    if cycle.draft is not None and cycle.draft.arm is not Arm.CACHE:
        out["d"] = _head_draft(request, cycle, cycle.draft, before, texts)
    if why.backlog > 1:
        out["b"] = why.backlog
    if not request.replayed:
        times = record.times
        out["t"] = [_short(each * 1e3) for each in (times.propose, times.gate, times.forward, times.walk)]
    return out


def _offer(
    request: ExplainedRequest, cycle: ExplainedCycle, draft: Draft, before: Int32Array, texts: _Texts
) -> dict[str, Any]:
    """The cache draft. Tokens that stand in the text already are not written again, nor those far behind what ran."""
    verified = cycle.record.drafted if cycle.record.arm is Arm.CACHE else 0
    copied = cycle.source.length if cycle.source is not None else 0
    return {
        **({"g": [draft.age, draft.origin]} if draft.age else {}),
        "t": texts.numbers(request.texts(draft.tokens[: verified + _AHEAD], before)[copied:]),
        "n": len(draft),
        "m": draft.match_len,
        "s": _short(draft.score),
        "l": int(draft.local),
        "q": [int(draft.counts[0]), int(draft.parent_counts[0])],
    }


def _head_draft(
    request: ExplainedRequest, cycle: ExplainedCycle, draft: Draft, before: Int32Array, texts: _Texts
) -> dict[str, Any]:
    """A head's draft; of a tree also the parents and the path that was accepted."""
    if draft.is_chain:
        return {"t": texts.numbers(request.texts(draft.tokens, before))}
    start = cycle.record.position
    committed = request.output[start : start + cycle.record.accepted]
    each = [request.texts(draft.tokens[i : i + 1], before)[0] for i in range(len(draft))]
    return {
        "t": texts.numbers(each),
        "u": draft.parents.tolist(),
        "y": accepted_nodes(draft, committed),
    }


def _prospect(prospect: Prospect, chosen: int) -> dict[str, Any]:
    """An arm: its longest draft, ms at `lengths_shown`, survival."""
    n = len(prospect.seconds)
    out: dict[str, Any] = {
        "a": ARMS.index(prospect.arm),
        "z": n,
        "ms": [_short(prospect.seconds[length - 1] * 1e3) for length in lengths_shown(n, chosen)],
    }
    if prospect.survival is not None:
        out["v"] = _packed(prospect.survival)
    return out


def _packed(shares: Float64Array) -> str:
    """Shares in [0, 1] with twelve bits each, two letters of base 64 a share."""
    values = np.rint(shares * 4095).astype(int).tolist()
    return "".join(_LETTERS[value >> 6] + _LETTERS[value & 63] for value in values)


def _short(value: float) -> float | int:
    """Three significant digits are enough to look at."""
    rounded = float(f"{value:.3g}")
    return int(rounded) if rounded.is_integer() else rounded


def _body(request: ExplainedRequest, title: str) -> str:
    shares = request.tokens_by_arm()
    facts = " \u00b7 ".join(
        escape(visible(fact))
        for fact in (
            request.model,
            f"policy {request.policy}",
            f"prompt of {len(request.prompt):,} tokens",
            "replayed from a trace" if request.replayed else "",
            request.name,
        )
        if fact
    )
    return f"""<header class="top">
<p class="kicker">Hybrid Verified Decoding</p>
<h1>{escape(visible(title)) or "Why this draft?"}</h1>
<p class="facts">{facts}</p>
<div class="tiles">
{_tiles(request)}
</div>
{_legend(shares)}
<div class="rhythm-box">
<svg id="rhythm" role="img" aria-label="Tokens committed in each cycle, in order" preserveAspectRatio="none"></svg>
<p class="caption">Every cycle (one pass of the model), in order; the height is how many tokens it committed.</p>
</div>
</header>
<main class="split">
<section class="text">
<details id="prompt-box"><summary>Prompt <span class="muted">{len(request.prompt):,} tokens</span></summary>
<div id="prompt" class="tokens" dir="auto"></div></details>
<h2>Answer <span class="muted">hover, tap, or use \u2190 \u2192</span></h2>
<div id="answer" class="tokens" dir="auto" role="listbox" aria-label="The answer, cycle by cycle"></div>
<noscript><p>This page draws itself with a script of its own; the answer as text:</p>
<pre>{escape(visible("".join(request.texts(request.output, request.prompt))))}</pre></noscript>
</section>
<aside id="panel" aria-live="polite" aria-label="The cycle that is selected"></aside>
</main>
<footer class="foot">The text is the same under every policy: drafts change how fast it comes,
never what it says.</footer>"""


def _tiles(request: ExplainedRequest) -> str:
    tokens, cycles = len(request.output), len(request.cycles)
    saved = 1.0 - cycles / tokens if tokens else 0.0
    tiles = (
        (f"{request.tokens_per_cycle:.2f}", "tokens per cycle", "hero"),
        (f"{tokens:,}", "tokens", ""),
        (f"{cycles:,}", "cycles", ""),
        (f"{saved:.0%}", "of plain decoding\u2019s passes saved", ""),
    )
    return "\n".join(
        f'<div class="tile {kind}"><span class="value">{value}</span><span class="label">{label}</span></div>'
        for value, label, kind in tiles
    )


def _legend(shares: Mapping[Arm, int]) -> str:
    """A bar of who wrote the tokens, and its legend: one thing."""
    total = sum(shares.values()) or 1
    bars, keys, left = [], [], 0.0
    for arm in ARMS:
        share = 100.0 * shares[arm] / total
        if share or arm is not Arm.EAGLE3:
            bars.append(f'<rect class="fill {arm.value}" x="{left:.2f}" y="0" width="{share:.2f}" height="1"/>')
            keys.append(f'<li><span class="swatch {arm.value}"></span>{NAMES[arm]} <b>{share:.0f}\u2009%</b></li>')
        left += share
    keys.append('<li><span class="swatch from"></span>what the cycle shown was copied from</li>')
    return (
        '<svg class="shares" viewBox="0 0 100 1" preserveAspectRatio="none" role="img" '
        f'aria-label="Share of tokens by arm">{"".join(bars)}</svg>\n<ul class="legend">{"".join(keys)}</ul>'
    )
