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
    """Whether an earlier process left compiled code of this kernel. It may be of another version of the file, whose
    contents Numba compares when it loads it."""
    dispatcher = cast(Any, kernel)
    folder, function = dispatcher.stats.cache_path, dispatcher.py_func
    if folder is None:
        return False
    name = f"{Path(function.__code__.co_filename).stem}.{function.__qualname__}-{function.__code__.co_firstlineno}"
    return any(Path(folder).glob(f"{name}.*.nbi"))
