"""Retrieved documents, each computed once and put together anew for every question.

One document says which alias a key stands for, another one the alias's value: none answers alone.
`assemble` moves the documents' K/V to their new places and repairs what they lack there.
"""

import numpy as np
from transformers import AutoModelForCausalLM

import kvpager
from kvpager.needles import BOS, END, KEY, SEPARATOR, NeedleTask, shipped_model_path

FACTS, STANDS_FOR = 4, 6
model = AutoModelForCausalLM.from_pretrained(shipped_model_path("tiny-two-hop"))
task = NeedleTask(seed=0)
keys, aliases = np.split(task.keys(2 * FACTS), 2)
values = task.filler(FACTS).tolist()
system = np.array([BOS, *task.filler(127)])
corpus = {}
for n in range(FACTS):
    value = [KEY, *aliases[n], SEPARATOR, values[n], END]
    key = [KEY, *keys[n], STANDS_FOR, *aliases[n], END]
    corpus[f"value-{n}"] = np.concatenate([task.filler(256), value, task.filler(250)])
    corpus[f"key-{n}"] = np.concatenate([task.filler(50 * n), key, task.filler(505 - 50 * n)])

with kvpager.Engine(model, pool_tokens=16384) as engine:
    for name, ids in corpus.items():
        engine.cache_segment(ids, name=name)
    for n in range(FACTS):
        found = task.rng.permutation(FACTS)  # both documents of each, in another order every time
        names = [f"{kind}-{i}" for kind in ("value", "key") for i in found]
        session = engine.assemble([system, *names, task.query(keys[n])])
        right = session.generate(2, eos=END).tokens.tolist() == [values[n], END]
        made = session.assembly
        assert made is not None
        print(f"{' '.join(names)}: {made.rows} of {made.tokens:,} tokens computed;")
        print(f"        the answer is right: {right}")
        session.close()
