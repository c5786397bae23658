"""The shape of a chunk: a value that the core, snapshots and the command line share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from kvpager import _core
from kvpager.errors import InvalidArgumentError

# dtypes of keys and values by `PagerConfig.kv_dtype`, where they are codes (kvpager/codes.h).
CODED = {"q8": ("q8", "q8"), "k8v4": ("q8", "q4"), "q4": ("q4", "q4")}
_Q4_GROUP = 32  # numbers that share a scale
Switch = Literal["auto", True, False]
FloatLayers = Literal["auto"] | tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Shape of a chunk: layers x {K, V} x kv_heads x chunk_tokens x head_dim.

    Args:
        layers: layers of the model.
        kv_heads: key/value heads per layer.
        k_dim: head_dim of keys, a multiple of 16.
        v_dim: head_dim of values, a multiple of 16.
        chunk_tokens: tokens per chunk: 16, 32, 64, 128 or 256.
        k_dtype: in which keys are stored: "float32", "float16", "bfloat16", or fewer bits, "q8" or
            "q4" (csrc/include/kvpager/codes.h); "q4" needs a k_dim that is a multiple of 32.
        v_dtype: in which values are stored, as `k_dtype`; "q4" needs such a v_dim.
        k_rotated: whether a key is rotated (Walsh-Hadamard) before it becomes codes.
        v_rotated: whether a value is.
        float_layers: ascending layers whose keys and values are no codes, where others' are.
        float_dtype: of these layers; "float32" without any.

    Raises:
        InvalidArgumentError: naming the field that is out of range.
    """

    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    chunk_tokens: int = 64
    k_dtype: str = "float32"
    v_dtype: str = "float32"
    k_rotated: bool = False
    v_rotated: bool = False
    float_layers: tuple[int, ...] = ()
    float_dtype: str = "float32"

    def __post_init__(self) -> None:
        try:
            ascending = tuple(sorted(set(self.float_layers)))
        except TypeError as error:
            raise InvalidArgumentError(f"{self!r}: {error}") from error
        object.__setattr__(self, "float_layers", ascending)
        self.native()

    @classmethod
    def of(cls, native: _core.Layout) -> Layout:
        """Converts a `_core.Layout`."""
        return cls(**{field.name: getattr(native, field.name) for field in fields(cls)})

    def native(self) -> _core.Layout:
        """Converts to a `_core.Layout`, which checks it."""
        try:
            return _core.Layout(**asdict(self))
        except TypeError as error:
            raise InvalidArgumentError(f"{self!r}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Its fields by name, without those that only codes have where there are none."""
        values = asdict(self)
        if not self.is_coded:
            for name in ("k_rotated", "v_rotated", "float_layers", "float_dtype"):
                del values[name]
        return values

    @property
    def is_coded(self) -> bool:
        """Whether keys or values are codes."""
        return any(dtype in ("q8", "q4") for dtype in (self.k_dtype, self.v_dtype))

    @property
    def format(self) -> str:
        """The formats of keys and values in a word or two, for people."""
        for name, dtypes in CODED.items():
            if dtypes == (self.k_dtype, self.v_dtype):
                return name
        if self.k_dtype == self.v_dtype:
            return self.k_dtype
        return f"{self.k_dtype} keys, {self.v_dtype} values"

    @property
    def rotation(self) -> str:
        """What is rotated: "keys and values", "keys", "values" or "none"."""
        names = {"keys": self.k_rotated, "values": self.v_rotated}
        return " and ".join(name for name, rotated in names.items() if rotated) or "none"

    def of_layer(self, layer: int) -> Layout:
        """The layout of a model that has this layer alone."""
        plain = replace(self, layers=1, float_layers=(), float_dtype="float32")
        if layer not in self.float_layers:
            return plain
        dtype = self.float_dtype
        return replace(plain, k_dtype=dtype, v_dtype=dtype, k_rotated=False, v_rotated=False)

    def kept_as(
        self, kv_dtype: str, rotation: Switch = "auto", float_layers: FloatLayers = "auto"
    ) -> Layout:
        """The layout of the same model's K/V, kept as `PagerConfig` says. self: in its own dtypes.

        Args:
            kv_dtype: `PagerConfig.kv_dtype`.
            rotation: `PagerConfig.kv_rotation`; "auto": True where they are codes.
            float_layers: `PagerConfig.float_layers`; "auto": layer 0 where something has 4 bits
                and there are other layers.

        Raises:
            InvalidArgumentError: naming the option that does not fit the others or the model.
        """
        if kv_dtype not in CODED:
            if rotation is True:
                raise _unfit("kv_rotation", rotation, kv_dtype, '"auto" or False')
            if float_layers not in ("auto", ()):
                raise _unfit("float_layers", float_layers, kv_dtype, '"auto" or ()')
            return self if kv_dtype == "auto" else replace(self, k_dtype=kv_dtype, v_dtype=kv_dtype)
        k_dtype, v_dtype = CODED[kv_dtype]
        if float_layers == "auto":
            float_layers = (0,) if "q4" in (k_dtype, v_dtype) and self.layers > 1 else ()
        _require_layers(float_layers, self.layers)
        for field, dtype, size in (("k_dim", k_dtype, self.k_dim), ("v_dim", v_dtype, self.v_dim)):
            if dtype == "q4" and size % _Q4_GROUP != 0:
                raise InvalidArgumentError(
                    f"kv_dtype is {kv_dtype!r} and {field}, the numbers of a head, is {size}; "
                    f'4 bits take a multiple of {_Q4_GROUP}: use "q8", or "auto"'
                )
        same = self.k_dtype == self.v_dtype
        return replace(
            self,
            k_dtype=k_dtype,
            v_dtype=v_dtype,
            k_rotated=rotation is not False,
            v_rotated=rotation is not False,
            float_layers=tuple(float_layers),
            float_dtype=self.k_dtype if float_layers and same else "float32",
        )

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk in the pool, padding included."""
        return self.native().chunk_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K/V per token, as a full cache would hold them."""
        return self.native().token_bytes


def _unfit(option: str, value: object, kv_dtype: str, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"PagerConfig.{option} is {value!r} and kv_dtype {kv_dtype!r}, in which nothing has fewer "
        f"bits; expected {expected}, or kv_dtype one of {', '.join(map(repr, CODED))}"
    )


def _require_layers(float_layers: Iterable[int], layers: int) -> None:
    for layer in float_layers:
        if layer >= layers:
            raise InvalidArgumentError(
                f"PagerConfig.float_layers has {layer}; expected layers of the model, 0 to "
                f"{layers - 1}"
            )
