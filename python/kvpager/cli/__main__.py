"""`python -m kvpager.cli` is `kvpager`."""

from __future__ import annotations

import sys

from kvpager.cli import main

sys.exit(main())
