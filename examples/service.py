"""Many conversations in one process, a line in and an answer out: python service.py [MODEL [PORT]]

Without MODEL the project's own tiny-coder answers, about Python's library. Talk to it with
`nc localhost 7070`. Answers are computed in common forwards.
"""

import asyncio
import contextlib
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpager
from kvpager.needles import shipped_model_path


async def main(name: str = "", port: str = "7070") -> None:
    name = name or str(shipped_model_path("tiny-coder"))
    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    with kvpager.Engine(model, tokenizer=tokenizer) as engine:
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
