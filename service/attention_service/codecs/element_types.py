"""The types of elements that bodies may have, by their names in each format. All are little-endian."""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

# The names in safetensors and in the Open Inference Protocol. JSON has the types of safetensors, by NumPy's names; npz
# has those of these that are NumPy's own.
_TYPES: Final = {
    np.dtype("?"): ("BOOL", "BOOL"),
    np.dtype("u1"): ("U8", "UINT8"),
    np.dtype("<u2"): ("U16", "UINT16"),
    np.dtype("<u4"): ("U32", "UINT32"),
    np.dtype("<u8"): ("U64", "UINT64"),
    np.dtype("i1"): ("I8", "INT8"),
    np.dtype("<i2"): ("I16", "INT16"),
    np.dtype("<i4"): ("I32", "INT32"),
    np.dtype("<i8"): ("I64", "INT64"),
    np.dtype("<f2"): ("F16", "FP16"),
    np.dtype(ml_dtypes.bfloat16): ("BF16", "BF16"),
    np.dtype(ml_dtypes.float8_e4m3fn): ("F8_E4M3", None),
    np.dtype(ml_dtypes.float8_e5m2): ("F8_E5M2", None),
    np.dtype(ml_dtypes.float8_e4m3fnuz): ("F8_E4M3FNUZ", None),
    np.dtype("<f4"): ("F32", "FP32"),
    np.dtype("<f8"): ("F64", "FP64"),
}
SAFETENSORS_TYPES: Final[dict[str, np.dtype]] = {name: dtype for dtype, (name, _) in _TYPES.items() if name is not None}
PROTOCOL_TYPES: Final[dict[str, np.dtype]] = {name: dtype for dtype, (_, name) in _TYPES.items() if name is not None}
JSON_TYPES: Final[dict[str, np.dtype]] = {dtype.name: dtype for dtype in SAFETENSORS_TYPES.values()}
NPZ_TYPES: Final = tuple(dtype for dtype in JSON_TYPES.values() if dtype.isbuiltin == 1)
