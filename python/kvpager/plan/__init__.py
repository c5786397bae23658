"""Memory on paper: what a model, its K/V and a pager take, before any of them is there.

    shape = read_shape("models/tiny-retriever")
    plan = recommend(shape, Budget(24 << 30), Workload(context=32768, sessions=4))
    print(plan.config, plan.spare)

Everything but `read_shape` and `shape_of` is arithmetic on numbers: no torch, no model, no device.
"""

from __future__ import annotations

from kvpager.plan.auto import PoolChoice, choose_pool
from kvpager.plan.memory import PagerMemory, pager_memory
from kvpager.plan.recommendation import Budget, Plan, Workload, recommend
from kvpager.plan.shape import KvShape, ModelShape, read_shape, shape_of

__all__ = [
    "Budget",
    "KvShape",
    "ModelShape",
    "PagerMemory",
    "Plan",
    "PoolChoice",
    "Workload",
    "choose_pool",
    "pager_memory",
    "read_shape",
    "recommend",
    "shape_of",
]
