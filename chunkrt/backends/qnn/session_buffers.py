"""Buffers of a session's inputs and outputs: memory that CPU and NPU share, or ordinary memory that the driver copies.

onnxruntime-qnn allocates shared memory (FastRPC's rpcmem) through an allocator of each session that was opened with
`enable_htp_shared_memory_allocator`. ONNX Runtime 1.32's Python interface finds the allocator by a device that its
public functions cannot name: memory of the CPU of the type HOST_ACCESSIBLE.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SHARED_MEMORY_OPTION = "enable_htp_shared_memory_allocator"


class Buffer(NamedTuple):
    """A float16 or int8 array, and the value of ONNX Runtime over its memory, which must live as long as the array."""

    array: NDArray[Any]
    value: Any


class BufferForm(NamedTuple):
    """Shape and data type, float16 or int8, of a buffer."""

    shape: Sequence[int]
    dtype: type[np.float16] | type[np.int8] = np.float16


def ordinary_buffer(form: BufferForm) -> Buffer:
    """Return zeros in ordinary memory."""
    import onnxruntime as ort

    array = np.zeros(tuple(form.shape), form.dtype)
    return Buffer(array, ort.OrtValue.ortvalue_from_numpy(array))


def shared_buffer(session: Any, device: Any, form: BufferForm) -> Buffer:
    """Return zeros in memory that a session shares with the NPU.

    Args:
        session: a session that was opened with SHARED_MEMORY_OPTION.
        device: ONNX Runtime's device of the NPU.

    Raises:
        Exception: the library offers no such memory, or this ONNX Runtime cannot allocate from it.
    """
    import onnxruntime as ort
    from onnxruntime.capi import _pybind_state as native

    memory = device.memory_info(native.OrtDeviceMemoryType.HOST_ACCESSIBLE)
    if memory is None:
        raise RuntimeError("the library offers no memory that CPU and NPU share")
    place = native.OrtDevice(
        native.OrtDevice.cpu(), memory.device_mem_type.value, memory.device_vendor_id, memory.device_id
    )
    inner = session._sess.create_ortvalue_from_shape_and_type(list(form.shape), form.dtype, place)
    element = ctypes.c_int8 if form.dtype is np.int8 else ctypes.c_uint16
    elements = ctypes.cast(inner.data_ptr(), ctypes.POINTER(element))
    array = np.ctypeslib.as_array(elements, tuple(form.shape)).view(form.dtype)
    array[...] = 0
    return Buffer(array, ort.OrtValue(inner, session=session._sess))
