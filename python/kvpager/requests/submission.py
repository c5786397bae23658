"""How a request queues: the checked options of `Scheduler.submit` beside those of generation."""

from __future__ import annotations

from dataclasses import dataclass

from kvpager.arguments import Integer, as_integer, is_finite, refusal
from kvpager.errors import InvalidArgumentError
from kvpager.salts import checked_salt, stretched


@dataclass(frozen=True)
class Queueing:
    """When a request is served, for how long, and in which namespace.

    Attributes:
        priority: lower ones are admitted earlier.
        timeout_s: seconds from its submission to its end at the latest; None: no limit.
        salt: of the session that is made for it, stretched; None: the engine's.
        tenant: whose it is.
    """

    priority: int = 0
    timeout_s: float | None = None
    salt: str | None = None
    tenant: str = ""

    @classmethod
    def checked(
        cls,
        priority: Integer,
        timeout_s: float | None,
        salt: str | None = None,
        *,
        tenant: str = "",
        session_given: bool = True,
    ) -> Queueing:
        """Raises InvalidArgumentError for a value out of range, or a salt beside a session."""
        if not isinstance(tenant, str):
            raise refusal("tenant", tenant, "text")
        if timeout_s is not None and not (is_finite(timeout_s) and timeout_s > 0):
            raise refusal("timeout_s", timeout_s, "seconds, more than 0, or None")
        if salt is not None and session_given:
            raise InvalidArgumentError(
                "salt is given beside a session, which has its own; expected None"
            )
        return cls(
            as_integer(priority, "priority", -(1 << 31)),
            None if timeout_s is None else float(timeout_s),
            None if salt is None else stretched(checked_salt(salt)),
            tenant,
        )
