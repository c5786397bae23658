"""Audits the prefix cache of any OpenAI-compatible server, from outside: `kvpager audit`.

`run.audit` sends texts cold, warm, continued, in company, after eviction and after a restart, and
compares tokens and log-probabilities. `compare` tells rounding from corruption, by the limit that
`limits` draws from cold runs.
"""

from __future__ import annotations

from kvpager.audit.asking import AuditError
from kvpager.audit.client import HttpError, Server
from kvpager.audit.report import Report
from kvpager.audit.run import Plan, audit

__all__ = ["AuditError", "HttpError", "Plan", "Report", "Server", "audit"]
