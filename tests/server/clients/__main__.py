"""Installs the clients, or prints the table of what was tried with those that are installed."""

from __future__ import annotations

import argparse

from server.clients.environments import CLIENTS

parser = argparse.ArgumentParser(prog="python -m server.clients", description=__doc__)
parser.add_argument("--table", action="store_true", help="print the table, install nothing")
arguments = parser.parse_args()
if arguments.table:
    print("| client | version | what was tried |\n|---|---|---|")
for client in CLIENTS:
    if arguments.table:
        print(f"| {client.title} | {client.version} | {'; '.join(client.tried)} |")
    elif not client.is_made:
        print(f"{client.title}: installing {' '.join(client.packages)}", flush=True)
        client.install()
