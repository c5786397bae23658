"""The relations that make up the promise: each a function that compares bits with a cold run."""

from __future__ import annotations

from kvpager.verify.relations.definition import Relation
from kvpager.verify.relations.table import RELATIONS, relation

__all__ = ["RELATIONS", "Relation", "relation"]
