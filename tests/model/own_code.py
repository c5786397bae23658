"""Models with code of a user's own, and what such code may read."""

from __future__ import annotations

import sys
import types

import torch
from reference_models import COMMON, build

SOURCE = """
import math
import torch
import numpy as np

factor = 1.0
table = {"factor": 1.0}

def helper(x):
    return x * factor * table["factor"]

def shifted(x, by=0.0, *, times=1.0):
    return (helper(x) + by) * times

class Settings:
    scale = 1.0
    def __init__(self):
        self.offset = 0.0
    def apply(self, x):
        return x * self.scale + self.offset

class Slotted:
    __slots__ = ("offset",)
    def __init__(self):
        self.offset = 0.0

class Block(torch.nn.Module):
    limit = 1e9

    def __init__(self, inner, **held):
        super().__init__()
        self.inner = inner
        vars(self).update(held)

    def forward(self, x):
        return shifted(self.read(self.inner(x).clamp(max=self.limit)))

    def read(self, x):
        return x
"""


def users_module(name="users_module"):
    """A module of a user's own, made anew."""
    made = types.ModuleType(name)
    sys.modules[name] = made
    exec(compile(SOURCE, f"<{name}>", "exec"), vars(made))
    return made


def with_block(read=None, *, architecture="llama", **held):
    """A model one of whose MLPs is a user's; `read` is what it does with its output.

    Returns the model, the block and the module that its code is in.
    """
    code = users_module()
    if read is not None:
        # As if it were written in that module, with the closure that it has.
        code.Block.read = types.FunctionType(
            read.__code__, vars(code), "read", read.__defaults__, read.__closure__
        )
    model = build(architecture)
    block = code.Block(model.model.layers[1].mlp, **held)
    model.model.layers[1].mlp = block
    return model, block, code


def steering():
    """A vector [hidden] that a model may add."""
    return torch.full((COMMON["hidden_size"],), 0.5)
