"""A conversation that survives a restart: python chat.py [--model M] "a message" ["another" ...]

M is a folder or the name of a chat model, such as Qwen/Qwen3-0.6B; without it the checkout's own
tiny-coder speaks, of Python's library and little else. Run it twice.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpager
from kvpager.needles import shipped_model_path

SAVED = Path("conversation.kvsnap")


def main(name: str | Path, *messages: str) -> None:
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("messages", nargs="*")
    args = parser.parse_args()
    main(args.model or shipped_model_path("tiny-coder"), *args.messages)
