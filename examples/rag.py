"""Documents that are computed once each, and put together in another order for every question.

    python rag.py [--model M]    M as for `kvpager chat`

`assemble` moves the documents' K/V to their new places and repairs what they lack there.
"""

import argparse

import kvpager
from kvpager.cli.models import chosen_model

DOCUMENTS = {
    "tea": "Tea: The Harbour Tea Room opens at nine, closes on Mondays, and sells black tea only. ",
    "ferry": "Ferry: The ferry to Lark Island leaves from pier four at noon and takes two hours. ",
    "museum": "Museum: The clock museum was founded by Ida Lund in 1911 and shows 300 clocks. ",
}
QUESTIONS = {
    "Who founded the clock museum?": ["museum", "tea", "ferry"],
    "From which pier does the ferry leave?": ["tea", "ferry", "museum"],
    "What kind of tea does the tea room sell?": ["ferry", "museum", "tea"],
}
parser = argparse.ArgumentParser()
parser.add_argument("--model")

with kvpager.Engine.from_pretrained(chosen_model(parser.parse_args()).path) as engine:
    for name, text in DOCUMENTS.items():
        engine.cache_segment(text, name=name)
    assert engine.tokenizer is not None
    encode = engine.tokenizer.encode
    for question, found in QUESTIONS.items():
        before = encode("<|im_start|>user\nAnswer in one sentence.\n\n")
        after = encode(f"\n{question}<|im_end|>\n<|im_start|>assistant\n")
        with engine.assemble([before, *found, after]) as session:
            print(f"{question} {session.generate(30).text}")
            if made := session.assembly:
                print(f"  ({' '.join(found)}: {made.rows} of {made.tokens} tokens computed)")
