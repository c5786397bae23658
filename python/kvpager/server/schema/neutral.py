"""Fields that clients send and that change nothing here: which they are, and how that is told.

A *hint* may be ignored without harm; an answer names it in the header `x-kvpager-ignored`. A field
that holds *only* some values asks for nothing beyond what is done anyway; others are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel

HEADER = "x-kvpager-ignored"

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Ignored:
    """Marks a field that is taken and ignored, but for values that ask for what is done anyway."""

    neutral: tuple[Any, ...] = ()


Hint = Annotated[_Value | None, Ignored()]


def only(*values: Any) -> AfterValidator:
    """The field's value asks for nothing: it is None, or one of these."""

    def checked(given: Any) -> Any:
        if given is not None and given not in values:
            told = " or ".join(repr(one) for one in (*values, None))
            raise ValueError(f"expected {told}: this server does nothing else")
        return given

    return AfterValidator(checked)


def ignored_fields(body: BaseModel) -> list[str]:
    """The fields that a request gives and that its answer does not heed, as paths."""
    found = []
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        if value is None or name not in body.model_fields_set:
            continue
        mark = next((one for one in field.metadata if isinstance(one, Ignored)), None)
        if mark is not None:
            found += [] if value in mark.neutral else [name]
        elif isinstance(value, BaseModel):
            found += [f"{name}.{inner}" for inner in ignored_fields(value)]
        elif name == "tools":
            found += {f"{name}.{inner}": 0 for tool in value for inner in ignored_fields(tool)}
    return found
