"""The parts of a causal LM that an engine calls: its decoder, its output head, its positions.

A matrix product may round differently when its row count changes, so the rows that need logits are
gathered and padded to a count that is known to give the bits of HEAD_ROWS rows. `logits_to_keep=1`
would change bits, and copies the whole weight of a bf16 head.
"""

from __future__ import annotations

import inspect
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from kvpager._model.seam.hooks import has_hooks
from kvpager.errors import InvalidArgumentError, UnsupportedModelError


def decoder_of(model: Any) -> Any:
    """The decoder of a causal LM, which takes `input_ids` and gives hidden states first.

    `get_decoder` finds it by name, and some architectures call their output embeddings "decoder".
    """
    found = model.get_decoder()
    return found if isinstance(found, PreTrainedModel) else model.base_model


def vocab_size(model: Any) -> int:
    """Number of token ids the model accepts."""
    return int(model.get_input_embeddings().weight.shape[0])


def made_up_tokens(model: Any, count: int, generator: torch.Generator) -> torch.Tensor:
    """Token ids [count] int64 on the model's device; the generator's, which is on the CPU."""
    drawn = torch.randint(vocab_size(model), (count,), generator=generator, device="cpu")
    return drawn.to(model.device)


@contextmanager
def requiring(what: str, remedy: str = "") -> Iterator[None]:
    """Within, a model's forward has to run; a refusal of our own is passed on.

    Raises UnsupportedModelError: `what` fails, for the message, with its error and a remedy.
    """
    try:
        yield
    except (InvalidArgumentError, UnsupportedModelError):
        raise
    except Exception as error:
        message = f"{what} ({type(error).__name__}: {error})"
        raise UnsupportedModelError(f"{message}; {remedy}" if remedy else message) from error


HEAD_ROWS = 16
_ALIGNMENT = 64  # bytes: torch's own on a CPU. Kernels may choose their path by it.


class Head:
    """A causal LM's output embeddings and what its class does to the logits after them."""

    def __init__(self, model: Any, counts: Sequence[int] = (HEAD_ROWS,)) -> None:
        """`counts`: ascending row counts that give the same bits (`RowCounts.head`)."""
        self._project = model.get_output_embeddings()
        self._dtype = self._project.weight.dtype
        self.finish = _finishing_step(model)  # of logits [..., vocab], element by element
        self._counts = tuple(counts)

    def __call__(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits [len(rows), vocab], in the head's dtype, of rows of hidden [M, hidden_size]."""
        largest = self._counts[-1]
        parts = []
        for start in range(0, len(rows), largest):
            wanted = list(rows[start : start + largest])
            count = self._counts[bisect_left(self._counts, len(wanted))]
            logits = self.logits(_gathered(hidden, wanted, count))
            parts.append(logits[: len(wanted)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def plain_weight(self) -> torch.Tensor | None:
        """The weight [vocab, hidden_size], if logits are its product and nothing else."""
        weight: torch.Tensor = self._project.weight
        plain = (
            type(self._project) is torch.nn.Linear
            and type(weight) is torch.nn.Parameter
            and getattr(self._project, "bias", None) is None
            and self.finish is None
            and "forward" not in vars(self._project)
            and not has_hooks(self._project)
        )
        return weight if plain else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of hidden states [n, hidden_size], by one product of n rows."""
        hidden = hidden.to(self._dtype)  # some decoders end in float32
        logits = self._project(hidden.unsqueeze(0))
        made: torch.Tensor = (logits if self.finish is None else self.finish(logits))[0]
        return made


def _gathered(hidden: torch.Tensor, wanted: list[int], count: int) -> torch.Tensor:
    """The wanted rows, and others up to `count`; a copy, unless they are the first ones."""
    # A step of decoding wants just those. A copy would begin at an aligned address, so this must.
    if (
        count <= hidden.shape[0]
        and wanted == list(range(len(wanted)))
        and hidden.is_contiguous()
        and hidden.data_ptr() % _ALIGNMENT == 0
    ):
        return hidden[:count]
    index = wanted + [wanted[0]] * (count - len(wanted))
    return hidden.index_select(0, torch.tensor(index, device=hidden.device))


def _finishing_step(model: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The step that an architecture adds between its output embeddings and its logits."""
    config = model.config
    if cap := getattr(config, "final_logit_softcapping", None):
        return lambda logits: torch.tanh(logits / cap) * cap
    if (multiplier := getattr(config, "lm_head_multiplier", None)) is not None:
        return lambda logits: logits * multiplier
    if (scale := getattr(model, "logit_scale", None)) is not None:
        return lambda logits: logits * scale
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        if config.model_type.startswith("granite"):
            return lambda logits: logits / scaling
        return lambda logits: logits * scaling
    return None


# From 5.24 on; before; before, of Mamba. Of a call that has two, transformers takes the first.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")

_names: weakref.WeakKeyDictionary[type, str | None] = weakref.WeakKeyDictionary()


def cache_argument(model: Any) -> str | None:
    """The name by which a causal LM takes its Cache, and by which its output has it.

    None: its decoder's forward takes none.
    """
    kind = type(decoder_of(model))
    if kind not in _names:
        taken = inspect.signature(kind.forward).parameters
        _names[kind] = next((name for name in CACHE_ARGUMENTS if name in taken), None)
    return _names[kind]


def handed(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword of a call of a model with a cache; none for None, or where it takes none."""
    name = cache_argument(model)
    return {} if cache is None or name is None else {name: cache}


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
