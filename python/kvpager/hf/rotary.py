"""Moves stored keys to other positions, by rotations found by running the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvpager.errors import InvalidArgumentError, UnsupportedModelError
from kvpager.hf.attention import running
from kvpager.hf.decoder import decoder_of
from kvpager.hf.observe import LayerTensors, Recorder, packed_inputs
from kvpager.hf.rotation import Rotation
from kvpager.hf.support import rope_problems

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
    generator = torch.Generator("cpu").manual_seed(3)  # the same tokens on every device
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocab, (_ROWS,), generator=generator, device="cpu").to(model.device)
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
    """Of keys moved from position 0 to the others, the largest error in roundings of the key."""
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
