"""Requests that end independently: the scheduler, its requests, their completions."""

from __future__ import annotations

from kvpager.requests.request import Request, RequestCompletion
from kvpager.requests.scheduler import Scheduler
from kvpager.requests.streams import AsyncScheduler, RequestStream

__all__ = ["AsyncScheduler", "Request", "RequestCompletion", "RequestStream", "Scheduler"]
