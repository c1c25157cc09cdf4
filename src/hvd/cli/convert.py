"""`hvd convert`: make the ONNX form of a model, once."""

from __future__ import annotations

import time

import click

from hvd.cli.console import emit_json, note, progress_bar


@click.command()
@click.option("--model", "-m", required=True, help="Hugging Face directory, hub id or GGUF file.")
@click.option("--weights", default="auto", help="int4, int8 or fp32; auto is the one that decoding takes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def convert(model: str, weights: str, as_json: bool) -> None:
    """Convert a model for decoding on a CPU. Decoding does it by itself the first time; this does it beforehand.

    The converted model lies in hvd's cache (HVD_CACHE moves it); its path is printed. Converting again does nothing.

    \b
    Examples:
      hvd convert --model SmolLM2-135M-Instruct.Q4_1.gguf
      hvd convert --model HuggingFaceTB/SmolLM2-135M-Instruct --weights int8
    """
    from hvd.models.checkpoint import load_checkpoint
    from hvd.models.loader import converted_model

    started = time.perf_counter()
    with progress_bar() as progress:
        done = converted_model(load_checkpoint(model), weights, progress)
    seconds = time.perf_counter() - started
    size = sum(path.stat().st_size for path in done.directory.iterdir())
    if as_json:
        facts = {"model": model, "name": done.name, "weights": done.weights, "directory": str(done.directory)}
        emit_json({**facts, "bytes": size, "seconds": seconds, "quantization": done.quantization})
        return
    click.echo(str(done.directory))
    note(f"{done.name}, {done.weights}, {size / 1e6:.0f} MB, {seconds:.1f} s")
    for what, count in done.quantization.items():
        note(f"  {count} matrices {what}")
