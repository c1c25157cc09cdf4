"""Numba as every kernel here uses it: compiled once, kept on the disk where a folder can be written.

Numba looks for changes in a function's own file only. So kernels that call each other stand in one file, long as it
gets.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


def jit(function: _Function) -> _Function:
    """Compile a kernel at its first call, or load what an earlier process compiled."""
    try:
        return cast(_Function, numba.njit(cache=True, error_model="numpy")(function))
    except RuntimeError:  # no folder for the cache can be written: every process compiles
        return cast(_Function, numba.njit(error_model="numpy")(function))


def callback(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for callers in C, or load what an earlier process compiled; they call its `address`."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return numba.cfunc(signature, cache=True, error_model="numpy")(function)
        except RuntimeError:
            return numba.cfunc(signature, error_model="numpy")(function)

    return decorate


def compiled(kernel: Callable[..., Any]) -> bool:
    """Whether an earlier process left compiled code of this kernel that is no older than its file."""
    dispatcher = cast(Any, kernel)
    folder = dispatcher.stats.cache_path
    if folder is None:
        return False
    source = Path(dispatcher.py_func.__code__.co_filename)
    kept = Path(folder).glob(f"{source.stem}.{dispatcher.py_func.__qualname__}-*.nbi")
    return any(path.stat().st_mtime >= source.stat().st_mtime for path in kept)
