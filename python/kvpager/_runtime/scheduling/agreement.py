"""How much log-probabilities of the same tokens differ between two runs, in terms of RL training.

In reinforcement learning one program generates text and another one computes its log-probabilities
again; training mistakes any difference between the two for a change of the policy. These are the
aggregates that such training monitors. If both programs use kvpager, each of them is exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpager.errors import InvalidArgumentError

CLIP = 0.2  # the usual bound of a probability ratio in PPO (Schulman et al. 2017)


@dataclass(frozen=True)
class Agreement:
    """Compares log-probabilities (natural, float32) of the same tokens, computed twice.

    With d = computed again - generated, per token:

    Attributes:
        tokens: how many were compared, at least 1.
        differing: tokens whose two log-probabilities are not the same 32 bits.
        max_abs_delta: largest |d|.
        approx_kl: mean of exp(d) - 1 - d, the low-variance estimate of the KL divergence
            (Schulman 2020).
        clip_fraction: share of tokens with |exp(d) - 1| > CLIP.
    """

    tokens: int
    differing: int
    max_abs_delta: float
    approx_kl: float
    clip_fraction: float

    @classmethod
    def between(
        cls, generated: npt.NDArray[np.float32], again: npt.NDArray[np.float32]
    ) -> Agreement:
        """Compares `generated` [n] with `again` [n], float32, n >= 1.

        Raises:
            InvalidArgumentError: other shapes or dtypes.
        """
        for name, values in (("generated", generated), ("again", again)):
            if values.dtype != np.float32 or values.ndim != 1 or not values.size:
                raise InvalidArgumentError(
                    f"{name} is {values.dtype} of shape {values.shape}; expected float32 [n], "
                    "n >= 1"
                )
        if generated.shape != again.shape:
            raise InvalidArgumentError(
                f"generated has {generated.size} log-probabilities, again {again.size}; expected "
                "those of the same tokens"
            )
        different = generated.view(np.uint32) != again.view(np.uint32)
        delta = np.zeros(generated.shape, dtype=np.float64)
        with np.errstate(invalid="ignore", over="ignore"):  # infinities give inf or NaN
            # Equal bits have a difference of 0, even where both are -inf.
            np.subtract(again, generated, out=delta, where=different, dtype=np.float64)
            ratio = np.expm1(delta)
            return cls(
                tokens=int(delta.size),
                differing=int(np.count_nonzero(different)),
                max_abs_delta=float(np.abs(delta).max()),
                approx_kl=float(np.mean(ratio - delta)),
                clip_fraction=float(np.mean(np.abs(ratio) > CLIP)),
            )

    def __str__(self) -> str:
        return (
            f"{self.differing:,} of {self.tokens:,} log-probabilities differ, "
            f"max |delta| {self.max_abs_delta:.3g}, approx. KL {self.approx_kl:.3g}, "
            f"clip fraction {self.clip_fraction:.3g}"
        )
