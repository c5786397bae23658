"""The whole model as a function of rows: K/V of every layer and the final hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvpager._model.seam.attention import running
from kvpager._model.seam.causal_lm import decoder_of
from kvpager._model.seam.observe import Observation, Recorder, difference, packed_inputs
from kvpager.errors import UnsupportedModelError

_TILE = 16  # rows; every tile of a GPU's kernels is a multiple


class WholeModel:
    """Rows of an observed forward, run again in forwards of any count, with the model's weights.

    What the parts were not tried on shows here: additions, rotations, and whatever else an
    architecture does between its modules. A count costs one forward of as many rows, which are not
    those of another count: together they try most rows of M.
    """

    def __init__(self, model: Any, seen: Observation) -> None:
        self._model = model
        self._seen = seen
        self._device = seen.tokens.device
        self._generator = torch.Generator("cpu").manual_seed(2)
        self._next = self._mixed(seen.rows)
        self._independent = False

    def differing(self, counts: Sequence[int]) -> dict[int, str]:
        """Of some row counts those that give other bits than M, each with what differs.

        Raises:
            UnsupportedModelError: it is not the count: a row's bits in a forward of M depend on its
                index or on other rows.
        """
        found = {count: what for count in counts if (what := self._difference_with(count))}
        if not self._independent and (found or not counts):
            self._require_independent_rows()
        self._independent = True  # otherwise all rows that agreed had other neighbours in M
        return found

    def _require_independent_rows(self) -> None:
        rows = self._seen.rows
        self._next = self._mixed(rows)
        if what := self._difference(rows, kept=rows - rows // 4):
            raise UnsupportedModelError(
                f"{type(self._model).__name__}: {what} of a row depend on its index or on the "
                "other rows of the forward, so no saved K/V could be trusted; use another "
                "architecture, dtype or number of rows, or one torch thread"
            )

    def _difference_with(self, count: int) -> str | None:
        try:
            what = self._difference(count, kept=count - count // 4)
        except (RuntimeError, ValueError, IndexError) as error:
            return f"{type(self._model).__name__}, which fails with it ({error})"
        return what and f"{what} of {type(self._model).__name__}"

    def _difference(self, count: int, *, kept: int) -> str | None:
        """What differs in one forward of `count` rows, of which `kept` are rows that were seen.

        They go to random places; the others hold token 0 at a far position.
        """
        seen = self._seen
        source, self._next = self._next[:kept], self._next.roll(-kept)
        place = self._mixed(count)[:kept][self._permutation(kept)]
        tokens = torch.zeros_like(seen.tokens[:1]).repeat(count)
        positions = torch.full_like(tokens, self._far_position())
        tokens[place], positions[place] = seen.tokens[source], seen.positions[source]
        again = Recorder()
        with running(again):
            hidden = decoder_of(self._model)(**packed_inputs(tokens, positions))[0][0]
        return difference((seen.layers, seen.hidden), (again.calls, hidden), source, place)

    def _mixed(self, count: int) -> torch.Tensor:
        """The rows of a forward in random order, but first where work is divided."""
        first = [row for end in self._ends(count) for row in (end - 1, end) if 0 <= row < count]
        random = torch.randperm(count, generator=self._generator, device="cpu").tolist()
        return torch.tensor(list(dict.fromkeys([*first, *random])), device=self._device)

    def _ends(self, count: int) -> list[int]:
        """Where the share of a thread ends, or a tile of a GPU's kernels."""
        if self._device.type == "cpu":
            threads = torch.get_num_threads()
            return sorted({count * thread // threads for thread in range(threads + 1)})
        return [*range(0, count, max(_TILE, count // 8)), count]

    def _permutation(self, count: int) -> torch.Tensor:
        drawn = torch.randperm(count, generator=self._generator, device="cpu")
        return drawn.to(self._device)

    def _far_position(self) -> int:
        config = self._model.config
        if not getattr(config, "rope_parameters", None):
            return 0  # learned positions: an index past the table would be an error
        return 2 * (getattr(config, "max_position_embeddings", None) or self._seen.rows) - 1
