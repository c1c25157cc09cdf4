"""Where a measurement was made: hardware, versions, the state of the source."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hvd import __version__

PACKAGES = ("numpy", "numba", "onnxruntime", "torch", "transformers", "llama-cpp-python", "vllm")


def environment() -> dict[str, object]:
    """JSON values: cpu, cores, memory, operating system, versions (None = not installed), commit (None = unknown)."""
    return {
        "cpu": cpu_model(),
        "cores": {"logical": os.cpu_count(), "usable": usable_cores()},
        "memory_gib": memory_gib(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"hvd": __version__} | {name: _version(name) for name in PACKAGES},
        "commit": commit(),
    }


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_gib() -> float | None:
    """Memory of the machine in GiB; None where the system does not tell."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit() -> str | None:
    """The git commit of a checkout that this package runs from, "+changes" behind it when files differ; else None."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    head, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--untracked-files=no")
    return None if head is None else head + ("+changes" if status else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
