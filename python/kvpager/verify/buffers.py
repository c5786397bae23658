"""Buffers that transformers does not save, such as a rotary embedding's frequencies.

They are computed when a model is loaded, and differ in a model that was cast as a whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

_FILE = "kvpager-buffers.safetensors"


def save_buffers(model: Any, folder: Path) -> None:
    """Writes all buffers of a model beside its weights."""
    tensors = {name: buffer.clone() for name, buffer in model.named_buffers()}
    save_file(tensors, folder / _FILE)


def load_buffers(model: Any, folder: Path) -> None:
    """Replaces a loaded model's buffers by those that `save_buffers` wrote, if it did."""
    if not (folder / _FILE).is_file():
        return
    for name, tensor in load_file(folder / _FILE).items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_buffer(leaf, tensor, persistent=False)
