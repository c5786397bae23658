"""How long a text a model takes."""

from __future__ import annotations

from typing import Any

import torch

from kvpager.errors import InvalidArgumentError

_SPARE = 16  # rows of a table of positions before the first: OPT has 2


class Positions:
    """The positions of one model: how many it was made for, and whether more are possible.

    Attributes:
        limit: `max_position_embeddings` of its configuration; None: it names no limit.
        learned: positions are rows of a table, so that there are none beyond it.
    """

    def __init__(self, model: Any, *, beyond: bool = False) -> None:
        """`beyond`: whether the owner wants more than the limit, where that is possible."""
        self.limit: int | None = getattr(model.config, "max_position_embeddings", None) or None
        tokens, limit = model.get_input_embeddings(), self.limit
        self.learned = limit is not None and any(
            isinstance(module, torch.nn.Embedding)
            and module is not tokens
            and 0 <= module.num_embeddings - limit <= _SPARE
            for module in model.get_decoder().modules()
        )
        self._beyond = beyond and not self.learned

    @property
    def most(self) -> int | None:
        """Most tokens of a text; None: any number."""
        return None if self._beyond else self.limit

    def check(self, total_tokens: int, what: str) -> None:
        """Raises InvalidArgumentError for a text that grows beyond them. `what`: its name."""
        if self.most is None or total_tokens <= self.most:
            return
        remedy = "give less"
        if not self.learned:
            remedy += ", or let the engine go on with PagerConfig(beyond_max_positions=True)"
        raise InvalidArgumentError(
            f"{what} comes to {total_tokens} tokens, but the model has "
            f"{'learned ' if self.learned else ''}positions for {self.limit} "
            f"(max_position_embeddings); {remedy}"
        )
