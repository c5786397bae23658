"""Requests that end independently: the scheduler, its requests, their completions."""

from __future__ import annotations

from kvpager.requests.completion import RequestCompletion
from kvpager.requests.request import Request
from kvpager.requests.scheduler import Scheduler

__all__ = ["Request", "RequestCompletion", "Scheduler"]
