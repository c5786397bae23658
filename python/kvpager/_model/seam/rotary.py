"""Moves stored keys to other positions, by rotations found by running the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpager._model.seam.attention import running
from kvpager._model.seam.causal_lm import decoder_of, made_up_tokens
from kvpager._model.seam.observe import LayerTensors, Recorder, packed_inputs
from kvpager._model.seam.support import rope_problems
from kvpager.errors import InvalidArgumentError, UnsupportedModelError

_BLOCK = 1 << 16  # elements turned at a time: what is made on the way stays in a processor's cache


@dataclass(frozen=True, eq=False)
class Rotation:
    """Turns pairs of a key's elements, each by position times frequency (Su et al., RoFormer).

    A factor on cosine and sine, as YaRN has, is the same at all positions and needs no word here.

    Attributes:
        frequencies: [pairs] float32 on the CPU, radians per position; negative ones turn backwards.
        start: the first element that turns. Those before it, and behind the last pair, do not.
        interleaved: whether the elements of a pair are neighbours (GPT-J); otherwise they are half
            of all turning elements apart (GPT-NeoX, Llama).
    """

    frequencies: torch.Tensor
    start: int
    interleaved: bool

    def between(self, old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine that take keys from positions `old` to `new`.

        A model rounds its angles to float32, at position 100 000 by up to 0.004. The difference
        is taken of angles rounded in the same way, so that such errors are turned back with the
        rest.

        Args:
            old: [n] int64 on the CPU.
            new: [n] int64 on the CPU.

        Returns:
            Two tensors [n, pairs], float32 on the CPU.
        """
        angles = self._angles(new) - self._angles(old)
        return angles.cos().float(), angles.sin().float()

    def apply(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Keys turned in float32 and rounded once to their dtype; a new tensor.

        A key's bits do not depend on the keys beside it.

        Args:
            keys: [n, kv_heads, k_dim], of any strides.
            cos: [n, pairs] float32, on the device of the keys.
            sin: as `cos`.
        """
        turned = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
        for still in (slice(self.start), slice(self.start + 2 * len(self.frequencies), None)):
            turned[..., still] = keys[..., still]
        block = max(1, _BLOCK // max(1, keys[:1].numel()))
        for begin in range(0, len(keys), block):
            part = slice(begin, begin + block)
            c, s = cos[part].unsqueeze(1), sin[part].unsqueeze(1)
            x, y = (half.float() for half in self._pairs(keys[part]))
            to_x, to_y = self._pairs(turned[part])
            to_x.copy_((x * c).sub_(y * s))
            to_y.copy_((x * s).add_(y * c))
        return turned

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        return (positions.float().unsqueeze(1) * self.frequencies).double()

    def _pairs(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first and of the second elements of all pairs, [n, kv_heads, pairs]."""
        pairs = len(self.frequencies)
        turning = keys[..., self.start : self.start + 2 * pairs]
        if self.interleaved:
            return turning[..., 0::2], turning[..., 1::2]
        return turning[..., :pairs], turning[..., pairs:]


_ROWS = 16  # tokens tried at each position
_NEAR = (1, 7, 293, 6151)  # positions tried beside the last one that the model has
_WITHOUT_LIMIT = 512  # positions of a model that names no limit
# How far off a key may be, in roundings of its largest element. Cosine, sine, two products and a
# sum make four; a wrong guess is off by about 1 / eps at one of the positions.
_ROUNDINGS = 16

Positions = Sequence[int] | np.ndarray[Any, Any]


class KeyMover:
    """Knows how position enters the keys of each layer; immutable, so that threads may share it.

    A key is rotated once, from the position it was computed at to its new one. Each further
    rotation would round again, so a moved key is never moved again.
    """

    def __init__(self, rotations: Sequence[Rotation | None]) -> None:
        """Takes the rotation of each layer; None where keys do not depend on position."""
        self._rotations = tuple(rotations)

    def at(self, old: Positions, new: Positions) -> Move:
        """What moves keys from positions `old` [n] to positions `new` [n], in any layer.

        Raises:
            InvalidArgumentError: not as many old as new ones, or negative ones.
        """
        before, after = _positions("old", old), _positions("new", new)
        if before.shape != after.shape:
            raise InvalidArgumentError(
                f"old has {len(before)} positions and new has {len(after)}; expected one of each "
                "per key"
            )
        return Move(self._rotations, before, after)


class Move:
    """From one list of positions to another. Layers of equal frequencies share their angles.

    Not to be used by several threads at a time.
    """

    def __init__(
        self, rotations: tuple[Rotation | None, ...], old: torch.Tensor, new: torch.Tensor
    ) -> None:
        self._rotations = rotations
        self._old = old
        self._new = new
        self._moving = old != new
        self._turns: dict[tuple[Rotation, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def move(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Keys of a layer, where they would be if their tokens stood at the new positions.

        Args:
            layer: index of the layer.
            keys: [n, kv_heads, k_dim] float32, float16 or bfloat16, of any strides and device, as
                they were computed at the old positions.

        Returns:
            [n, kv_heads, k_dim] in the same dtype: turned in float32 and rounded once. It is
            `keys` itself where nothing moves; a key whose position stays keeps its bits.

        Raises:
            InvalidArgumentError: not one key per position.
        """
        if len(keys) != len(self._old):
            raise InvalidArgumentError(
                f"{len(keys)} keys for {len(self._old)} positions; expected one key per position"
            )
        rotation = self._rotations[layer]
        if rotation is None or not self._moving.any():
            return keys
        moved = rotation.apply(keys, *self._turns_of(rotation, keys.device))
        if self._moving.all():
            return moved
        return torch.where(self._moving.to(keys.device)[:, None, None], moved, keys)

    def _turns_of(
        self, rotation: Rotation, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if (rotation, device) not in self._turns:
            cos, sin = rotation.between(self._old, self._new)
            self._turns[rotation, device] = cos.to(device), sin.to(device)
        return self._turns[rotation, device]


def find_rotation(model: Any) -> KeyMover:
    """Finds out how position enters the keys of each layer, by running the model.

    A few tokens are run at several positions, each attending to itself alone, so that only position
    differs. What takes a layer's keys from position 0 to all the others, within rounding, is taken:
    nothing, or a rotation by one of the model's own tables of frequencies. Names of architectures
    and of options are not trusted.

    Args:
        model: a causal LM that `check_supported` accepted and `attach` knows. No
            other forward may run meanwhile.

    Raises:
        UnsupportedModelError: some layer's keys or values depend on position in another way. Names
            the layer and says what to do.
    """
    for reason, remedy in rope_problems(model.config):
        raise UnsupportedModelError(f"{type(model).__name__}: {reason}; {remedy}")
    seen = {position: _seen_at(model, position) for position in _probed_positions(model)}
    k_dim = seen[0][0][1].shape[-1]
    guesses = [None, *_guesses(model, k_dim)]
    rotations = []
    for layer in range(len(seen[0])):
        at = {position: layers[layer] for position, layers in seen.items()}
        _require_values_without_position(model, layer, at)
        rotations.append(_best(model, layer, at, guesses))
    return KeyMover(rotations)


def _probed_positions(model: Any) -> list[int]:
    limit = getattr(model.config, "max_position_embeddings", None) or _WITHOUT_LIMIT
    return [0, *(position for position in sorted({*_NEAR, limit - 1}) if 0 < position < limit)]


def _seen_at(model: Any, position: int) -> dict[int, LayerTensors]:
    """q, k and v of each layer for the same tokens, all of them at one position.

    As a token's row is the same at all positions, so are its hidden states, to the bit, unless
    position enters them.
    """
    tokens = made_up_tokens(model, _ROWS, torch.Generator("cpu").manual_seed(3))
    recorder = Recorder()
    with torch.inference_mode(), running(recorder):
        decoder_of(model)(**packed_inputs(tokens, torch.full_like(tokens, position)))
    return recorder.calls


def _guesses(model: Any, k_dim: int) -> Iterator[Rotation]:
    """Every way in which a table of frequencies in the model may turn a key of `k_dim` elements."""
    tables = {
        tuple(buffer.float().flatten().tolist()): None  # in order, each once
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and 0 < 2 * buffer.numel() <= k_dim
    }
    for table in tables:
        for direction in (1, -1):
            frequencies = direction * torch.tensor(table, dtype=torch.float32, device="cpu")
            for start in sorted({0, k_dim - 2 * len(table)}):
                for interleaved in (False, True):
                    yield Rotation(frequencies, start, interleaved)


def _require_values_without_position(model: Any, layer: int, at: dict[int, LayerTensors]) -> None:
    (_, _, before), *later = at.values()
    if any(_error(v, before) > _ROUNDINGS for _, _, v in later):
        raise UnsupportedModelError(
            f"{type(model).__name__}: values of layer {layer} change with the position of their "
            "token, as learned and other absolute position embeddings make them, so that no "
            "rotation moves its K/V; for segments use a model whose positions are rotary (RoPE)"
        )


def _best(
    model: Any, layer: int, at: dict[int, LayerTensors], guesses: Sequence[Rotation | None]
) -> Rotation | None:
    errors = [_error_of(guess, at) for guess in guesses]
    least = min(errors)
    if not least <= _ROUNDINGS:
        raise UnsupportedModelError(
            f"{type(model).__name__}: keys of layer {layer} do not turn with their position as any "
            f"of the model's own tables of frequencies would have it (the best of {len(guesses)} "
            f"guesses is off by {least:.3g} roundings at positions {', '.join(map(str, at))}; "
            f"expected at most {_ROUNDINGS}), so that they cannot be moved; for segments use a "
            "model that leaves keys as its rotary position embedding (RoPE) made them"
        )
    return guesses[errors.index(least)]


def _error_of(guess: Rotation | None, at: dict[int, LayerTensors]) -> float:
    """Largest error, in roundings, of keys moved from position 0 to the others."""
    before = at[0][1].float()
    worst = 0.0
    for position, (_, after, _) in at.items():
        moved = before
        if guess is not None and position:
            old = torch.zeros(len(before), dtype=torch.int64, device="cpu")
            cos, sin = guess.between(old, torch.full_like(old, position))
            moved = guess.apply(before, cos.to(before.device), sin.to(before.device))
        worst = max(worst, _error(after, moved))
    return worst


def _error(x: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference, in roundings of x's dtype of the reference's largest element.

    Args:
        x: [n, kv_heads, dim], as the model computed it.
        reference: likewise, in the same dtype or float32; one vector per row and head.
    """
    precision = torch.finfo(x.dtype)
    wide = reference.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(precision.tiny) * precision.eps
    return float(((x.float() - wide).abs() / scale).nan_to_num(nan=torch.inf).max())


def _positions(name: str, positions: Positions) -> torch.Tensor:
    found = torch.from_numpy(np.array(positions, dtype=np.int64))
    if found.ndim != 1 or (found < 0).any():
        raise InvalidArgumentError(
            f"{name} has shape {tuple(found.shape)} and least element "
            f"{int(found.min()) if found.numel() else 0}; expected positions [n] of 0 or more"
        )
    return found
