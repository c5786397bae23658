"""Many conversations in one process, a line in and an answer out: python service.py [MODEL [PORT]]

Without MODEL the model of `kvpager serve` answers. Talk to it with `nc localhost 7070`. Answers
are computed in common forwards.
"""

import argparse
import asyncio
import contextlib
import sys

import kvpager
from kvpager.cli.models import chosen_model


async def main(name: str = "", port: str = "7070") -> None:
    chosen = chosen_model(argparse.Namespace(model=name or None))
    with kvpager.Engine.from_pretrained(chosen.path) as engine:
        async with engine.serve() as serving:

            async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                with contextlib.suppress(ConnectionError), engine.session() as session:
                    while line := (await reader.readline()).decode(errors="replace").strip():
                        async for text in serving.chat(session, line, max_new_tokens=200):
                            writer.write(text.encode())
                            await writer.drain()
                        writer.write(b"\n\n")
                writer.close()

            server = await asyncio.start_server(talk, "localhost", int(port))
            print(f"listening on port {server.sockets[0].getsockname()[1]}", flush=True)
            await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # ends it
        asyncio.run(main(*sys.argv[1:]))
