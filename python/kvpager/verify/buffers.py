"""Buffers that transformers does not save, such as a rotary embedding's frequencies.

They are computed anew when a model is loaded, and in a model that was cast as a whole they are not
what they were.
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
    """Puts what `save_buffers` wrote, if it did, in the place of a loaded model's own."""
    if not (folder / _FILE).is_file():
        return
    for name, tensor in load_file(folder / _FILE).items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_buffer(leaf, tensor, persistent=False)
