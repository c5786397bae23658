"""`python -m kvpager` is the command `kvpager`."""

from kvpager.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
