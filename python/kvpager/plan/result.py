"""A plan: its inputs, its configuration, and the expected speeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpager.config import Dense, PagerConfig, Selection
from kvpager.config_json import config_to_json
from kvpager.plan import costs
from kvpager.plan.bounded import Freed, freed
from kvpager.plan.budget import Budget, Workload
from kvpager.plan.costs import Cost, Run
from kvpager.plan.machine import Machine
from kvpager.plan.memory import PagerMemory
from kvpager.plan.shape import KvShape, ModelShape

_FROM_CONTEXT = 1024  # the shortest that speeds are given for
SUFFIX_TOKENS = 64  # of a warm turn's new prompt


@dataclass(frozen=True)
class Speed:
    """Seconds of a decode step at a context, as recommended, dense, and what K/V are in memory."""

    context: int
    chosen: Cost
    dense: Cost
    pool_bytes: int
    full_bytes: int


@dataclass(frozen=True)
class Plan:
    """A recommendation, why, and what to expect.

    Attributes:
        shape, machine, budget, workload: what it is for.
        config: what to give to an Engine.
        kv: the model's K/V in chunks.
        rows: M.
        memory: what the pager takes.
        working: bytes a forward takes for a while.
        margin: bytes left alone.
        redundant: everything fits into the pool: paging would not be needed.
        spare: bytes left where the pool is.
        why: one line per choice.
    """

    shape: ModelShape
    machine: Machine
    budget: Budget
    workload: Workload
    config: PagerConfig
    kv: KvShape
    rows: int
    memory: PagerMemory
    working: int
    margin: int
    redundant: bool
    spare: int
    why: tuple[str, ...]

    def run(self, selection: Selection | None = None) -> Run:
        """For `costs`, with the recommended selection or another one."""
        return Run(
            self.shape,
            self.kv,
            self.machine,
            self.rows,
            self.config.selection if selection is None else selection,
            self.config.pool_blocks,
            self.memory.host // self.kv.chunk_bytes,
        )

    @property
    def contexts(self) -> tuple[int, ...]:
        """Contexts that speeds are given for: powers of four up to the workload's."""
        return contexts_up_to(self.workload.context)

    def speeds(self) -> list[Speed]:
        """A decode step at each of `contexts`, with all sessions of the workload."""
        sessions = self.workload.sessions
        return [
            Speed(
                at,
                costs.decode(self.run(), at, sessions),
                costs.decode(self.run(Dense()), at, sessions),
                min(self.memory.pool, sessions * at * self.kv.token_bytes),
                sessions * at * self.kv.token_bytes,
            )
            for at in self.contexts
        ]

    @property
    def cold(self) -> Cost:
        """The first token of a whole context, from nothing."""
        return costs.prefill(self.run(), 0, self.workload.context)

    def warm(self, *, cached: bool) -> Cost:
        """The first token of a restored context and a short new prompt."""
        new = min(SUFFIX_TOKENS, self.workload.context)
        return costs.first_token(
            self.run(), max(1, self.workload.context - new), new, cached=cached
        )

    @property
    def save(self) -> Cost:
        """Saving one session."""
        return costs.save(self.run(), self.workload.context)

    @property
    def restore(self) -> Cost:
        """Opening its snapshot."""
        return costs.restore(self.run(), self.workload.context)

    def freed(self) -> Freed:
        """What a pool of just what a step reads would leave free."""
        return freed(self.shape, self.kv, self.machine, self.budget, self.workload, self.rows)


def contexts_up_to(context: int) -> tuple[int, ...]:
    """Powers of four from 1K on, and the context itself."""
    at, found = _FROM_CONTEXT, []
    while at < context:
        found.append(at)
        at *= 4
    return (*found, context)


def to_json(plan: Plan) -> dict[str, Any]:
    """Everything that a plan says, of types that JSON has."""

    def cost(value: Cost) -> dict[str, Any]:
        return {
            "seconds": value.seconds,
            "bound": value.bound,
            "terms": {term.name: term.seconds for term in value.terms},
        }

    return {
        "model": {**vars(plan.shape), "windows": list(plan.shape.windows)}
        | {"parameters": plan.shape.parameters, "weight_bytes": plan.shape.weight_bytes},
        "machine": {"name": plan.machine.name, "source": plan.machine.source},
        "budget": vars(plan.budget),
        "workload": vars(plan.workload),
        "config": config_to_json(plan.config),
        "rows": plan.rows,
        "kv": vars(plan.kv),
        "memory": vars(plan.memory)
        | {"weights": plan.shape.weight_bytes, "working": plan.working, "margin": plan.margin},
        "redundant": plan.redundant,
        "spare_bytes": plan.spare,
        "freed": vars(plan.freed()) | {"bytes": plan.freed().bytes},
        "why": list(plan.why),
        "cold_first_token": cost(plan.cold),
        "warm_first_token": {
            "cached": cost(plan.warm(cached=True)),
            "from_disk": cost(plan.warm(cached=False)),
        },
        "save": cost(plan.save),
        "restore": cost(plan.restore),
        "decode": [
            {
                "context": speed.context,
                "tokens_per_second": plan.workload.sessions / speed.chosen.seconds,
                "dense_tokens_per_second": plan.workload.sessions / speed.dense.seconds,
                **cost(speed.chosen),
            }
            for speed in plan.speeds()
        ],
    }
