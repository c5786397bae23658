"""At start: is the attention of a call's keywords the attention that the model means?

An attention call has keywords (window, soft cap, sinks) and a mask. Kernels of attention read one,
the other or both; a running forward reads keywords alone, because a mask over packed rows does not
exist. Whatever a model says in its mask alone would be lost: so each layer's call is answered here
by the model's own function, mask and all, and compared with what the keywords ask for. What the
mask lets rows see is read from the function that makes it, as far as the model has positions. Then
a forward as an engine runs it, of the same tokens in another order, has to have the same K/V.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from kvpager._model.proof.masks import MaskMaker, NotCausalWindowError, window_of
from kvpager._model.seam.attention import WholeCalls, note_mask_window, running
from kvpager._model.seam.causal_lm import decoder_of, made_up_tokens, requiring
from kvpager._model.seam.observe import Recorder, packed_inputs
from kvpager.errors import UnsupportedModelError


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row over the rows whose positions it sees.

    Args:
        q: [n, q_heads, k_dim] of one sequence, its rows in any order.
        k: [n, kv_heads, k_dim].
        v: [n, kv_heads, v_dim].
        positions: [n] int64, each once.
        scaling: of scores.
        window: positions that a row sees, itself among them; None: all up to its own.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [q_heads], a score each that takes weight and has no value.

    Returns:
        [n, q_heads, v_dim], and the largest size of a score [], as q's dtype.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, keys) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    back = positions[:, None] - positions[None, :]
    seen = back >= 0 if window is None else (back >= 0) & (back < window)
    largest = scores.abs().amax()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, len(q), 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    out = torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(group, dim=1))
    return out.contiguous(), largest


_SDPA = AttentionInterface()["sdpa"]  # type: ignore[no-untyped-call]
_BEYOND = 17  # rows past the longest window that is tried in numbers, and past a chunk
_MOST_ROWS = 256  # longer windows are compared as masks alone
_ROUNDINGS = 64  # tolerance, in float32 roundings of a score or a value (docs/design/07)
# Of queries, keys and values in a forward: the median over rows of the relative error. Measured are
# 1e-6 and 0.008 at most; a near tie of a router changes a whole row, so no bound holds for each.
_APART = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}


@dataclass
class _Call:
    """One layer's attention: what it was given, what is seen, and how far off the keywords are."""

    module: torch.nn.Module
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    window: int | None


@dataclass
class _OwnCalls(WholeCalls):
    """Answers every call as the model's own eager attention does, in float32."""

    name: str
    longest: int
    masks: MaskMaker = field(default_factory=MaskMaker)
    calls: list[_Call] = field(default_factory=list)

    def mask(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return self.masks.make(*args, **kwargs)

    def called(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        where = f"{self.name}: layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
        window = self._window(where, mask, options.get("sliding_window"))
        wide = {
            name: option.float()
            if isinstance(option, torch.Tensor) and option.is_floating_point()
            else option
            for name, option in options.items()
        }
        own = _own_function(module, mask)
        answer, _ = own(
            module,
            query.float(),
            key.float(),
            value.float(),
            mask.float() if mask is not None and mask.is_floating_point() else mask,
            **wide,
        )
        self._compare(where, answer[0], query, key, value, window, wide)
        tensors = tuple(x[0].transpose(0, 1).clone() for x in (query, key, value))
        self.calls.append(_Call(module, tensors, window))  # type: ignore[arg-type]
        made: torch.Tensor = answer.to(query.dtype)
        return made

    def _window(self, where: str, mask: torch.Tensor | None, named: int | None) -> int | None:
        """What a row sees by the mask; raises UnsupportedModelError where that is no window."""
        if mask is None:
            return named
        function = self.masks.function_of(mask)
        if function is None:
            raise UnsupportedModelError(
                f"{where} makes its own mask of the one it is given, as a bias on scores or a "
                "choice of keys does; attention here is over every key up to a row's own, or over "
                "the last ones of a window"
            )
        try:
            window = window_of(function, self.longest)
        except NotCausalWindowError as error:
            raise UnsupportedModelError(
                f"{where}: {error}; attention here is over every key up to a row's own, or over "
                "the last ones of a window"
            ) from error
        if named is not None and window != named:
            raise UnsupportedModelError(
                f"{where} asks for a window of {named} positions, and its mask has "
                + ("none" if window is None else f"one of {window}")
                + ", so that it is not known which is meant"
            )
        return window

    def _compare(
        self,
        where: str,
        answer: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        options: dict[str, Any],
    ) -> None:
        if not bool(answer.isfinite().all()):
            return  # of such weights nothing can be told; a forward that computes so is refused
        q, k, v = (x[0].transpose(0, 1).float() for x in (query, key, value))
        scaling = options.get("scaling")
        expected, largest = attend_dense(
            q,
            k,
            v,
            torch.arange(len(q), device=q.device),
            scaling=q.shape[-1] ** -0.5 if scaling is None else scaling,
            window=window,
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )
        bound = _ROUNDINGS * torch.finfo(torch.float32).eps * float((1 + largest) * v.abs().amax())
        apart = (answer - expected).abs().flatten(1).amax(1)
        worst = int(apart.nan_to_num(nan=torch.inf).argmax())
        if not float(apart[worst]) <= bound:
            raise UnsupportedModelError(
                f"{where}: at position {worst} its own attention gives numbers that are "
                f"{float(apart[worst]):.3g} from attention over "
                f"{'all keys' if window is None else f'{window} positions'} "
                f"with its scaling, soft cap and sinks (rounding explains {bound:.2g}), so that it "
                "does what its call does not say"
            )


@dataclass
class _Dense(Recorder):
    """A forward over rows of one sequence, in any order, by the calls' keywords alone."""

    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any
    ) -> torch.Tensor:
        super().attend(layer, q, k, v, **call)
        window, softcap, sinks = (call.get(name) for name in ("window", "softcap", "sinks"))
        out, _ = attend_dense(
            q.float(),
            k.float(),
            v.float(),
            self.positions,
            scaling=call["scaling"],
            window=window,
            softcap=softcap,
            sinks=None if sinks is None else sinks.float(),
        )
        return out.to(q.dtype)


def require_own_attention(model: Any, chunk_tokens: int, *, packed: bool = True) -> None:
    """Runs a few tokens with the model's own attention and by its calls' keywords; compares.

    A window that only the mask has is noted at its module, for later calls to be answered with it.

    Args:
        model: a causal LM that `check_supported` accepted and whose attention is kvpager's.
        chunk_tokens: rows of a chunk; a few more are tried, and more than short windows have.
        packed: whether an engine runs it on packed rows; recurrent layers are not run so.

    Raises:
        UnsupportedModelError: they differ; names the layer, the position and by how much.
    """
    tokens = _tokens(model, max(chunk_tokens, _named_windows(model)) + _BEYOND)
    own = _own_forward(model, tokens)
    longer = max((call.window or 0 for call in own.calls), default=0) + _BEYOND
    if len(tokens) < longer <= _MOST_ROWS and len(_tokens(model, longer)) > len(tokens):
        tokens = _tokens(model, longer)
        own = _own_forward(model, tokens)
    for call in own.calls:
        note_mask_window(call.module, call.window)
    if packed:
        _require_same_model(model, tokens, own)


def _own_forward(model: Any, tokens: torch.Tensor) -> _OwnCalls:
    """One forward of consecutive tokens, as transformers would run it."""
    name = type(model).__name__
    own = _OwnCalls(name, getattr(model.config, "max_position_embeddings", None) or 0)
    positions = torch.arange(len(tokens), device=tokens.device)
    with torch.inference_mode(), running(own):
        _run(
            model, {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False}
        )
    return own


def _require_same_model(model: Any, tokens: torch.Tensor, own: _OwnCalls) -> None:
    """The same tokens as an engine runs them: in another order, without a mask."""
    generator = torch.Generator("cpu").manual_seed(5)
    order = torch.randperm(len(tokens), generator=generator, device="cpu").to(tokens.device)
    packed = _Dense(positions=order)
    with torch.inference_mode(), running(packed):
        _run(model, packed_inputs(tokens[order], order))
    for call, (layer, tensors) in zip(own.calls, packed.calls.items()):
        for what, ours, theirs in zip(("queries", "keys", "values"), tensors, call.tensors):
            if not bool(theirs.isfinite().all()):
                return
            apart = _row_errors(ours, theirs[order])
            middle = float(apart.median())
            if not middle <= _APART.get(ours.dtype, 0.2):
                worst = int(order[apart.nan_to_num(nan=torch.inf).argmax()])
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {what} of layer {layer} are not those of the model "
                    f"when its tokens come as packed rows in another order: off by {middle:.2g} of "
                    f"their size in the median, most at position {worst}. A row depends on its "
                    "index or on other rows, or its position is not that of position_ids"
                )


def _run(model: Any, inputs: dict[str, Any]) -> None:
    with requiring(
        f"{type(model).__name__} does not run on a few tokens of one sequence",
        "use a decoder-only causal LM whose decoder takes input_ids and position_ids",
    ):
        decoder_of(model)(**inputs)


def _own_function(module: torch.nn.Module, mask: torch.Tensor | None) -> Any:
    """Eager attention as the module's architecture defines it; what sdpa does without a mask."""
    if mask is not None:
        for kind in type(module).__mro__:
            home = sys.modules.get(kind.__module__)
            if function := getattr(home, "eager_attention_forward", None):
                return function
    return _SDPA


def _row_errors(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """[n]: of each row the size of the difference as a part of the row's."""
    a, b = ours.double().flatten(1), theirs.double().flatten(1)
    size = torch.linalg.vector_norm(b, dim=1).clamp_min(1e-30)
    errors: torch.Tensor = torch.linalg.vector_norm(a - b, dim=1) / size
    return errors


def _tokens(model: Any, count: int) -> torch.Tensor:
    longest = getattr(model.config, "max_position_embeddings", None) or count
    return made_up_tokens(model, min(count, longest), torch.Generator("cpu").manual_seed(4))


def _named_windows(model: Any) -> int:
    """The longest of the short windows that a configuration names, by whatever name."""
    sizes = [
        value
        for name, value in vars(model.config).items()
        if ("window" in name or "chunk" in name or "local" in name)
        and type(value) is int
        and 0 < value <= _MOST_ROWS - _BEYOND
    ]
    return max(sizes, default=0)
