"""What the bindings know of DLPack's binary interface is what torch's header says of it."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "dlpack.h"
FIELDS = {
    ("Version", "DLPackVersion"): {"major": "major", "minor": "minor"},
    ("Device", "DLDevice"): {"type": "device_type", "id": "device_id"},
    ("DataType", "DLDataType"): {"code": "code", "bits": "bits", "lanes": "lanes"},
    ("Tensor", "DLTensor"): {
        "data": "data",
        "device": "device",
        "ndim": "ndim",
        "dtype": "dtype",
        "shape": "shape",
        "strides": "strides",
        "byte_offset": "byte_offset",
    },
    ("ManagedTensor", "DLManagedTensor"): {
        "tensor": "dl_tensor",
        "manager": "manager_ctx",
        "deleter": "deleter",
    },
    ("ExchangeApi", "DLPackExchangeAPI"): {
        "version": "header.version",
        "previous": "header.prev_api",
        "allocate": "managed_tensor_allocator",
        "managed_from_object": "managed_tensor_from_py_object_no_sync",
        "managed_to_object": "managed_tensor_to_py_object_no_sync",
        "tensor_from_object": "dltensor_from_py_object_no_sync",
        "current_stream": "current_work_stream",
    },
}
VALUES = {
    "kMajorVersion": "DLPACK_MAJOR_VERSION",
    "kCpu": "kDLCPU",
    "kCuda": "kDLCUDA",
    "kCudaHost": "kDLCUDAHost",
    "kFloat": "kDLFloat",
    "kBfloat": "kDLBfloat",
}


def _claims() -> str:
    lines = ["#include <cstddef>", '#include "bindings/dlpack.h"', "#include <ATen/dlpack.h>"]
    for (ours, theirs), fields in FIELDS.items():
        ours = f"kvpager::dlpack::{ours}"
        lines.append(f"static_assert(sizeof({ours}) == sizeof({theirs}));")
        for mine, other in fields.items():
            lines.append(
                f"static_assert(offsetof({ours}, {mine}) == offsetof({theirs}, {other}) &&"
                f" sizeof({ours}::{mine}) == sizeof({theirs}::{other}));"
            )
    for mine, other in VALUES.items():
        lines.append(f"static_assert(static_cast<int>(kvpager::dlpack::{mine}) == {other});")
    return "\n".join(lines) + "\n"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.skipif(not HEADER.exists(), reason="this torch has no headers")
def test_layouts_and_values_are_those_of_torchs_header(tmp_path):
    source = tmp_path / "claims.cc"
    source.write_text(_claims().replace("sizeof(kvpager", "sizeof (kvpager"))
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof"]
    command += [f"-I{ROOT / 'csrc'}", f"-I{HEADER.parents[1]}", str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
