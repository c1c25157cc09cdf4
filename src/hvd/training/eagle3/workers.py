"""The text for a head, written by several processes: on a CPU one of them leaves much of the cores idle."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
"""Seconds between two looks at whether the others live."""

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
    # What a process is started with is written to it while the caller waits for it to have started; prompts are many.
    shares: multiprocessing.Queue[Sequence[Prompt]] = context.Queue()
    processes: list[BaseProcess] = [
        context.Process(target=_work, args=(i, messages, shares, writer, out, options), daemon=True)
        for i in range(workers)
    ]
    try:
        for worker, process in enumerate(processes):
            with _held_signals():
                process.start()
            shares.put(prompts[worker::workers])
        _follow(processes, messages, progress, note)
    except BaseException:
        shares.cancel_join_thread()
        for process in processes:
            if process.pid is not None:
                process.terminate()
        raise
    finally:
        for process in processes:
            if process.pid is not None:
                process.join()


@contextmanager
def _held_signals() -> Iterator[None]:
    """A process started in here ignores Ctrl-C from its first moment, and a signal that would break in acts behind it:
    a process half started is one that nobody knows of."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    for number in handlers:
        ignored = number == signal.SIGINT
        signal.signal(number, signal.SIG_IGN if ignored else lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


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
    shares: multiprocessing.Queue[Sequence[Prompt]],
    writer: Writer,
    out: Path,
    options: Eagle3Options,
) -> None:
    """One worker. Ends by its parent's SIGTERM or end, once what it has is written; it ignores Ctrl-C."""
    parent, asked = multiprocessing.parent_process(), False

    def share() -> Sequence[Prompt]:
        while parent is None or parent.is_alive():
            try:
                return shares.get(timeout=_PATIENCE)
            except queue.Empty:
                continue
        raise KeyboardInterrupt

    def end(*_: object) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    def progress(what: str, done: int, total: int) -> None:
        # Asked again: an exception that rises inside of a callback or of a bare except of others' code is lost.
        if asked or (parent is not None and not parent.is_alive()):
            raise KeyboardInterrupt
        messages.put(("progress", worker, (what, done, total)))

    try:
        llm, prompts = writer.open(), share()
        signal.signal(signal.SIGTERM, end)  # before that there is nothing to write, and the signal ends it at once
        write_text(llm, prompts, out, options, progress, lambda line: messages.put(("note", worker, line)))
        said: _Message = ("done", worker, None)
    except KeyboardInterrupt:
        messages.cancel_join_thread()  # nobody reads any longer: to wait for that would be for ever
        return
    except HVDError as error:
        said = ("failed", worker, error)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    messages.put(said)
