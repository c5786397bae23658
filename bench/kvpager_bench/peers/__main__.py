"""Lists, installs and removes the peers that benchmarks are compared with.

kvpager bench peers list
kvpager bench peers install llama vllm
kvpager bench peers remove lmcache
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvpager_bench.peers import environments
from kvpager_bench.peers.environments import PEERS, Missing, PeerError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a peer could not be installed; the others are tried all the same."""
    parser = argparse.ArgumentParser(
        prog="kvpager bench peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", nargs="?", choices=("list", "install", "remove"), default="list")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PEERS)}; all")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in PEERS]
    if unknown:
        parser.error(f"no peer is named {', '.join(unknown)}; expected {', '.join(PEERS)}")
    names: list[str] = arguments.names or list(PEERS)
    if arguments.action == "list":
        _list(names)
    elif arguments.action == "remove":
        for name in names:
            print(f"{PEERS[name].title}: {environments.remove(name) / 1e6:,.0f} MB freed")
    else:
        return _install(names)
    return 0


def _list(names: Sequence[str]) -> None:
    print(f"peers in {environments.root()}")
    for name in names:
        found = environments.find(name)
        said = found.reason if isinstance(found, Missing) else "installed"
        print(f"  {name:8} {found.title:18} {found.recipe.gives}: {said}")


def _install(names: Sequence[str]) -> int:
    done = [_installed(name) for name in names]  # a failure does not keep the others out
    return 0 if all(done) else 1


def _installed(name: str) -> bool:
    try:
        environments.install(name, lambda line: print(line, flush=True))
    except PeerError as error:
        print(error, file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
