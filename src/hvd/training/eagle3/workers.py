"""The text for a head, written by several processes: on a CPU one of them leaves much of the cores idle."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hvd.config import EngineConfig, SuffixConfig
from hvd.engine.llm import LLM
from hvd.errors import HVDError, TrainingError
from hvd.traces.prompts import Prompt
from hvd.training.eagle3.answers import Note, Progress
from hvd.training.eagle3.train import Eagle3Options, write_text

_PATIENCE = 0.5
"""Seconds between two looks at whether all workers live."""

_Message = tuple[str, int, Any]
"""(kind, worker, what is said): "progress" (what, done, total), "note" a line, "failed" an error, "done" None."""


@dataclass(frozen=True, slots=True)
class Writer:
    """How the target is opened for writing text and reading hidden states; can be sent to another process.

    threads   None = all cores
    batch     answers generated side by side
    """

    model: str
    dtype: str = "bfloat16"
    device: str = "auto"
    threads: int | None = None
    batch: int = 64

    def open(self, progress: Progress | None = None) -> LLM:
        """The target. Short copies are verified whenever there is one: in a large batch a pass hardly notices them."""
        suffix = SuffixConfig(mode="arctic", shared=False)
        return LLM(
            self.model,
            backend="torch",
            weights=self.dtype,
            device=self.device,
            threads=self.threads,
            eagle3="none",
            predictor="none",
            config=EngineConfig(policy="cache", max_batch=self.batch, prefill_chunk=512, suffix=suffix),
            progress=progress,
        )


def write_text_with(
    workers: int,
    writer: Writer,
    prompts: Sequence[Prompt],
    out: Path,
    options: Eagle3Options,
    progress: Progress,
    note: Note,
) -> None:
    """Make the answers that `write_text` will find: each worker answers its share of the prompts, on its share of the
    cores. Raises what one of them raised, TrainingError when one dies; what was answered stays. Hold `only_run(out)`
    around it."""
    workers = min(workers, len(prompts))
    if workers < 1:
        return
    threads = max(1, (writer.threads or os.cpu_count() or 1) // workers)
    writer, options = replace(writer, threads=threads), replace(options, recorded=False)
    context = multiprocessing.get_context("spawn")
    messages: multiprocessing.Queue[_Message] = context.Queue()
    processes: list[BaseProcess] = [
        context.Process(target=_work, args=(i, messages, writer, prompts[i::workers], out, options), daemon=True)
        for i in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        _follow(processes, messages, progress, note)
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.join()


def _follow(
    processes: Sequence[BaseProcess], messages: multiprocessing.Queue[_Message], progress: Progress, note: Note
) -> None:
    """Pass on what the workers say until all are done. Raises what one raised, TrainingError when one dies."""
    counts: dict[int, tuple[str, int, int]] = {}
    left = set(range(len(processes)))
    while left:
        try:
            kind, worker, said = messages.get(timeout=_PATIENCE)
        except queue.Empty:
            dead = [worker for worker in left if not processes[worker].is_alive()]
            if dead and messages.empty():
                code = processes[dead[0]].exitcode
                raise TrainingError(
                    f"a process that writes answers died (exit code {code}; out of memory?); give fewer --workers"
                ) from None
            continue
        if kind == "failed":
            raise said
        if kind == "note":
            note(said)
        if kind == "progress":
            counts[worker] = said
            progress(said[0], sum(done for _, done, _ in counts.values()), sum(total for *_, total in counts.values()))
        if kind == "done":
            left.discard(worker)


def _work(
    worker: int,
    messages: multiprocessing.Queue[_Message],
    writer: Writer,
    prompts: Sequence[Prompt],
    out: Path,
    options: Eagle3Options,
) -> None:
    """One worker. Ends by its parent's SIGTERM or end, once what it has is written; Ctrl-C is for the parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    parent = multiprocessing.parent_process()

    def progress(what: str, done: int, total: int) -> None:
        if parent is not None and not parent.is_alive():
            raise KeyboardInterrupt
        messages.put(("progress", worker, (what, done, total)))

    try:
        write_text(writer.open(), prompts, out, options, progress, lambda line: messages.put(("note", worker, line)))
        said: _Message = ("done", worker, None)
    except KeyboardInterrupt:
        return
    except HVDError as error:
        said = ("failed", worker, error)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    messages.put(said)
