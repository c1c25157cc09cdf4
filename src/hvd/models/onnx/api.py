"""ONNX Runtime by its C interface, which the package `onnxruntime` brings along as a library.

The package's Python module can't be given an operator that was compiled in this process; the C interface can
(`attention_kernel`). It is stable: functions keep their place in the table of OrtApi, new ones are added at the end
(onnxruntime_c_api.h; the numbers below are places of version 22, which the package has had since 1.22).
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd.errors import HVDError
from hvd.jit import callback

API_VERSION = 22
KERNEL_CONTEXT_GET_INPUT, KERNEL_CONTEXT_GET_OUTPUT = 90, 91
GET_TENSOR_MUTABLE_DATA, KERNEL_CONTEXT_PARALLEL_FOR = 51, 274
GET_TENSOR_SHAPE_ELEMENT_COUNT, GET_TENSOR_TYPE_AND_SHAPE, RELEASE_TENSOR_TYPE_AND_SHAPE_INFO = 64, 65, 99
FLOAT32, UINT8, INT32, INT64 = 1, 2, 6, 7
_TYPES = {np.dtype(np.float32): FLOAT32, np.dtype(np.int32): INT32, np.dtype(np.int64): INT64}
DOMAIN = "hvd"
OPERATOR_VERSION = 16
_FATAL, _FAIL = 4, 1
_REQUIRED, _OPTIONAL = 0, 1
_SEQUENTIAL = _PLAIN_GRAPH = 0

# name: place in the table, arguments; all give an OrtStatus* that is null when it went well
_FUNCTIONS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "CreateEnv": (3, (c_int, c_char_p, POINTER(c_void_p))),
    "DisableTelemetryEvents": (6, (c_void_p,)),
    "CreateSession": (7, (c_void_p, c_void_p, c_void_p, POINTER(c_void_p))),
    "CreateSessionOptions": (10, (POINTER(c_void_p),)),
    "SetSessionExecutionMode": (13, (c_void_p, c_int)),
    "DisableMemPattern": (17, (c_void_p,)),
    "SetSessionGraphOptimizationLevel": (23, (c_void_p, c_int)),
    "SetIntraOpNumThreads": (24, (c_void_p, c_int)),
    "SetInterOpNumThreads": (25, (c_void_p, c_int)),
    "CreateCustomOpDomain": (26, (c_char_p, POINTER(c_void_p))),
    "CustomOpDomain_Add": (27, (c_void_p, c_void_p)),
    "AddCustomOpDomain": (28, (c_void_p, c_void_p)),
    "CreateTensorWithDataAsOrtValue": (
        49, (c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_int, POINTER(c_void_p)),
    ),
    "CreateCpuMemoryInfo": (69, (c_int, c_int, POINTER(c_void_p))),
    "KernelInfoGetAttribute_int64": (86, (c_void_p, c_char_p, POINTER(c_int64))),
    "RunWithBinding": (133, (c_void_p, c_void_p, c_void_p)),
    "CreateIoBinding": (134, (c_void_p, POINTER(c_void_p))),
    "BindInput": (136, (c_void_p, c_char_p, c_void_p)),
    "BindOutput": (137, (c_void_p, c_char_p, c_void_p)),
}  # fmt: skip
_RELEASE = {"Status": 93, "Session": 95, "Value": 96, "SessionOptions": 100, "CustomOpDomain": 101, "IoBinding": 135}


@callback("void(voidptr)")
def nothing(kernel):  # type: ignore[no-untyped-def]
    """An operator's KernelDestroy: its arrays are Python's."""


class OnnxRuntimeError(HVDError):
    """What the runtime said."""


class Api:
    """The functions of the C interface; each raises OnnxRuntimeError with the runtime's message."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(_library()))
        base = CFUNCTYPE(c_void_p)(("OrtGetApiBase", library))()
        table = CFUNCTYPE(c_void_p, c_uint32)(ctypes.cast(base, POINTER(c_void_p))[0])(API_VERSION)
        if not table:
            raise OnnxRuntimeError(f"the installed onnxruntime is too old; version 1.{API_VERSION} or later is needed")
        self.table = int(table)
        self.places = ctypes.cast(table, POINTER(c_void_p))
        self._library = library
        self._status = CFUNCTYPE(c_void_p, c_int, c_char_p)(self.places[0])
        self._message = CFUNCTYPE(c_char_p, c_void_p)(self.places[2])
        self._functions = {
            name: CFUNCTYPE(c_void_p, *arguments)(self.places[place]) for name, (place, arguments) in _FUNCTIONS.items()
        }
        self._release = {name: CFUNCTYPE(None, c_void_p)(self.places[place]) for name, place in _RELEASE.items()}
        self.environment = self.make("CreateEnv", _FATAL, b"hvd")
        self.call("DisableTelemetryEvents", self.environment)
        self.memory = self.make("CreateCpuMemoryInfo", 0, 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function by its name in OrtApi."""
        status = self._functions[name](*arguments)
        if status:
            message = self._message(status)
            self._release["Status"](status)
            raise OnnxRuntimeError((message or b"").decode("utf-8", "replace"))

    def status(self, message: str) -> int:
        """An OrtStatus* that says so."""
        return int(self._status(_FAIL, message.encode()))

    def make(self, name: str, *arguments: Any) -> c_void_p:
        """Call a function that gives something back through its last argument."""
        made = c_void_p()
        self.call(name, *arguments, ctypes.byref(made))
        return made

    def release(self, kind: str, thing: c_void_p) -> None:
        """Let go of what `make` gave."""
        self._release[kind](thing)


@cache
def api() -> Api:
    """The runtime, loaded at the first call. Raises OnnxRuntimeError when it is missing or too old."""
    return Api()


def _library() -> Path:
    """The library, beside the package's own modules. The package itself is not imported."""
    found = importlib.util.find_spec("onnxruntime")
    folder = Path(found.origin).parent / "capi" if found and found.origin else None
    names = ("libonnxruntime.so*", "libonnxruntime*.dylib", "onnxruntime.dll")
    for path in sorted(path for name in names if folder for path in folder.glob(name)):
        return path
    raise OnnxRuntimeError("the package onnxruntime has no library; install onnxruntime 1.22 or later")


_TEXT, _COUNT = CFUNCTYPE(c_void_p, c_void_p), CFUNCTYPE(c_size_t, c_void_p)
_KIND = CFUNCTYPE(c_int, c_void_p, c_size_t)
_CREATE = CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_void_p))


class _CustomOp(ctypes.Structure):
    """OrtCustomOp, up to the functions that a description of version OPERATOR_VERSION is asked for."""

    _fields_ = [
        ("version", c_uint32),
        ("create_v1", c_void_p),
        ("name", _TEXT),
        ("provider", _TEXT),
        ("input_type", _KIND),
        ("inputs", _COUNT),
        ("output_type", _KIND),
        ("outputs", _COUNT),
        ("compute_v1", c_void_p),
        ("destroy", c_void_p),
        ("input_kind", _KIND),
        ("output_kind", _KIND),
        ("memory", _KIND),
        ("variadic", c_void_p * 4),
        ("create", _CREATE),
        ("compute", c_void_p),
        ("later", c_void_p * 16),
    ]


class Operator:
    """An operator "hvd.<name>" with one output, float32, computed by compiled code. Keep it while a session lives that
    was opened with it.

    inputs       types of its inputs, `optional` of them may be missing at the end
    attributes   what a node says, whole numbers
    create       called for every node with its attributes; gives the int64 array whose address `compute` gets
    compute      address of a C function (int64 *kernel, OrtKernelContext *) -> OrtStatus *
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[int],
        attributes: Sequence[str],
        create: Callable[[dict[str, int]], NDArray[np.int64]],
        compute: int,
        optional: int = 0,
    ) -> None:
        runtime = api()
        self._kernels: list[NDArray[np.int64]] = []
        self._name = ctypes.create_string_buffer(name.encode())

        def make(_: int, __: int, info: int, kernel: Any) -> int | None:
            try:
                told, value = {}, c_int64()
                for attribute in attributes:
                    runtime.call("KernelInfoGetAttribute_int64", info, attribute.encode(), ctypes.byref(value))
                    told[attribute] = value.value
                self._kernels.append(create(told))
                kernel[0] = self._kernels[-1].ctypes.data
            except Exception as error:  # noqa: BLE001 - C can't take it; it comes back from CreateSession
                return runtime.status(str(error))
            return None

        required = _KIND(lambda *_: _REQUIRED)
        self.description = _CustomOp(
            version=OPERATOR_VERSION,
            name=_TEXT(lambda _: ctypes.addressof(self._name)),
            provider=_TEXT(lambda _: None),  # the CPU's
            input_type=_KIND(lambda _, index: inputs[index]),
            inputs=_COUNT(lambda _: len(inputs)),
            output_type=_KIND(lambda *_: FLOAT32),
            outputs=_COUNT(lambda _: 1),
            destroy=nothing.address,
            input_kind=_KIND(lambda _, index: _OPTIONAL if index >= len(inputs) - optional else _REQUIRED),
            output_kind=required,
            memory=_KIND(lambda *_: 0),
            create=_CREATE(make),
            compute=compute,
        )


class Session:
    """A graph, ready to run. Optimising it is left undone: operators are fused when it is built."""

    def __init__(self, path: Path, threads: int | None = None, operators: Sequence[Operator] = ()) -> None:
        """threads   None = all cores"""
        self._api, self._operators = api(), operators
        domain = self._api.make("CreateCustomOpDomain", DOMAIN.encode())
        options = self._api.make("CreateSessionOptions")
        try:
            self._api.call("SetSessionGraphOptimizationLevel", options, _PLAIN_GRAPH)
            self._api.call("SetSessionExecutionMode", options, _SEQUENTIAL)
            self._api.call("SetIntraOpNumThreads", options, threads or 0)
            self._api.call("SetInterOpNumThreads", options, 1)
            self._api.call("DisableMemPattern", options)  # kept for every width and context seen: a leak here
            for operator in operators:
                self._api.call("CustomOpDomain_Add", domain, ctypes.byref(operator.description))
            self._api.call("AddCustomOpDomain", options, domain)
            self._handle = self._api.make("CreateSession", self._api.environment, _path(path), options)
        finally:
            self._api.release("SessionOptions", options)
            self._api.release("CustomOpDomain", domain)

    def binding(self) -> Binding:
        """A set of arrays to run the graph on."""
        return Binding(self)

    def _run(self, binding: c_void_p) -> None:
        self._api.call("RunWithBinding", self._handle, None, binding)

    def __del__(self) -> None:
        if hasattr(self, "_handle") and not sys.is_finalizing():
            self._api.release("Session", self._handle)


class Binding:
    """The arrays that a graph reads and writes; they are kept alive, and stay bound until others take their names."""

    def __init__(self, session: Session) -> None:
        self._api, self._session = api(), session
        self._arrays: dict[str, NDArray[Any]] = {}
        self._bound: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._handle = self._api.make("CreateIoBinding", session._handle)

    def input(self, name: str, array: NDArray[Any], shape: tuple[int, ...] | None = None) -> None:
        """Let the graph read `array` (C-contiguous float32, int32 or int64), what begins there as `shape`."""
        self._bind("BindInput", name, array, shape)

    def output(self, name: str, array: NDArray[Any], shape: tuple[int, ...] | None = None) -> None:
        """Let the graph write into `array`, as `input`."""
        self._bind("BindOutput", name, array, shape)

    def run(self) -> None:
        """Run the graph on what is bound."""
        self._session._run(self._handle)

    def _bind(self, how: str, name: str, array: NDArray[Any], shape: tuple[int, ...] | None) -> None:
        if not array.flags.c_contiguous:
            raise ValueError(f"the array for {name} is not C-contiguous")
        shape = array.shape if shape is None else shape
        data = array.ctypes.data
        self._arrays[name] = array
        if self._bound.get(name) == (data, shape):
            return
        sizes, size, kind = (c_int64 * len(shape))(*shape), math.prod(shape) * array.itemsize, _TYPES[array.dtype]
        value = self._api.make("CreateTensorWithDataAsOrtValue", self._api.memory, data, size, sizes, len(shape), kind)
        self._api.call(how, self._handle, name.encode(), value)
        self._api.release("Value", value)  # the binding holds it
        self._bound[name] = (data, shape)

    def __del__(self) -> None:
        if hasattr(self, "_handle") and not sys.is_finalizing():
            self._api.release("IoBinding", self._handle)


def _path(path: Path) -> Any:
    """A path as the interface takes it: wide characters on Windows."""
    return (
        ctypes.create_unicode_buffer(str(path)) if os.name == "nt" else ctypes.create_string_buffer(os.fsencode(path))
    )
