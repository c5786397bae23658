"""Time and memory on paper: what a model costs on a machine, before either is there.

    shape = read_shape("models/tiny-retriever")
    plan = recommend(shape, DEVICES["rtx4090"], Budget(24 << 30, 64 << 30), Workload(32768))
    print(plan.config, plan.cold.seconds, plan.cold.bound)

Everything but `read_shape`, `shape_of` and `measure` is arithmetic on numbers: no torch, no model,
no device.
"""

from __future__ import annotations

from kvpager.plan.advise import recommend
from kvpager.plan.auto import PoolChoice, choose_pool
from kvpager.plan.bounded import Freed
from kvpager.plan.budget import Budget, Workload
from kvpager.plan.costs import Cost, Run, Term, decode, first_token, prefill, restore, save
from kvpager.plan.machine import DEVICES, Machine, Products, device_named
from kvpager.plan.memory import PagerMemory, pager_memory
from kvpager.plan.result import Plan, Speed
from kvpager.plan.shape import KvShape, ModelShape, read_shape, shape_of

__all__ = [
    "DEVICES",
    "Budget",
    "Cost",
    "Freed",
    "KvShape",
    "Machine",
    "ModelShape",
    "PagerMemory",
    "Plan",
    "PoolChoice",
    "Products",
    "Run",
    "Speed",
    "Term",
    "Workload",
    "choose_pool",
    "decode",
    "device_named",
    "first_token",
    "pager_memory",
    "prefill",
    "read_shape",
    "recommend",
    "restore",
    "save",
    "shape_of",
]
