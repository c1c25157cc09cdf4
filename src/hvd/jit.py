"""Numba as every kernel here uses it: compiled once, kept on the disk where a folder can be written.

Numba looks for changes in a function's own file only. So kernels that call each other stand in one file, long as it
gets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
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


class Callback:
    """A function for callers in C. It is compiled when its address is first asked for, or loaded."""

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        self._function, self._signature = function, signature

    @cached_property
    def _compiled(self) -> Any:
        try:
            return numba.cfunc(self._signature, cache=True, error_model="numpy")(self._function)
        except RuntimeError:  # as above
            return numba.cfunc(self._signature, error_model="numpy")(self._function)

    @property
    def address(self) -> int:
        """What C calls."""
        return int(self._compiled.address)


def callback(signature: str) -> Callable[[Callable[..., Any]], Callback]:
    """Make a function of numbers and void pointers one for callers in C."""
    return lambda function: Callback(function, signature)


def compiled(kernel: Callable[..., Any]) -> bool:
    """Whether an earlier process left compiled code of this kernel that is no older than its file."""
    dispatcher = cast(Any, kernel)
    folder = dispatcher.stats.cache_path
    if folder is None:
        return False
    source = Path(dispatcher.py_func.__code__.co_filename)
    kept = Path(folder).glob(f"{source.stem}.{dispatcher.py_func.__qualname__}-*.nbi")
    return any(path.stat().st_mtime >= source.stat().st_mtime for path in kept)
