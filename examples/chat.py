"""A conversation that survives a restart: python chat.py MODEL "a message" ["another" ...]

MODEL is a folder or the name of a chat model, such as Qwen/Qwen3-0.6B. Run it twice.
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpager

SAVED = Path("conversation.kvsnap")


def main(name: str, *messages: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    with kvpager.Engine(model, tokenizer=tokenizer) as engine:
        session = engine.restore(SAVED) if SAVED.exists() else engine.session()
        for earlier in session.messages:
            print(f"{earlier['role']}: {earlier['content']}")
        for message in messages:
            print(f"user: {message}\nassistant: ", end="")
            for text in session.chat(message, max_new_tokens=200, stream=True):
                print(text, end="", flush=True)
            print()
        session.save(SAVED)
        print(f"({session.restored_tokens} tokens restored, {session.tokens_computed} computed)")


if __name__ == "__main__":
    main(*sys.argv[1:])
