"""How a request queues: the checked options of `Scheduler.submit` beside those of generation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvpager.errors import InvalidArgumentError
from kvpager.salts import checked_salt, stretched
from kvpager.tokens import Integer, as_integer


@dataclass(frozen=True)
class Queueing:
    """When a request is served, for how long, and in which namespace.

    Attributes:
        priority: lower ones are admitted earlier.
        timeout_s: seconds from its submission to its end at the latest; None: no limit.
        salt: of the session that is made for it, stretched; None: the engine's.
    """

    priority: int = 0
    timeout_s: float | None = None
    salt: str | None = None

    @classmethod
    def checked(
        cls,
        priority: Integer,
        timeout_s: float | None,
        salt: str | None = None,
        *,
        session_given: bool = True,
    ) -> Queueing:
        """Raises InvalidArgumentError for a value out of range, or a salt beside a session."""
        if timeout_s is not None:
            number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
            if not number or not 0 < timeout_s < math.inf:
                raise InvalidArgumentError(
                    f"timeout_s is {timeout_s!r}; expected seconds, more than 0, or None"
                )
        if salt is not None and session_given:
            raise InvalidArgumentError(
                "salt is given beside a session, which has its own; expected None"
            )
        return cls(
            as_integer(priority, "priority", -(1 << 31)),
            None if timeout_s is None else float(timeout_s),
            None if salt is None else stretched(checked_salt(salt)),
        )
