"""An agent renders its whole conversation anew for every prompt; the session keeps what it can.

Reasoning is dropped from the text after each turn, the process "restarts" half way, and the last
answer is generated once more. The shipped model looks up records of the system prompt.
"""

import tempfile

from transformers import AutoModelForCausalLM

import kvpager
from kvpager.cli.needles import END, NeedleTask, shipped_model_path

model = AutoModelForCausalLM.from_pretrained(shipped_model_path())
task = NeedleTask(seed=0)
records = task.document(4096, 4)
text = records.ids.tolist()  # the system prompt, then all that is said

with tempfile.TemporaryDirectory() as folder:
    store = kvpager.DirectoryStore(folder)
    engine = kvpager.Engine(model, pool_tokens=16384)
    session = engine.session()
    for turn, key, value in zip(range(1, 5), records.keys, records.values):
        text += task.filler(64).tolist()
        message = session.update(text)  # makes the session hold exactly this text
        thoughts = session.generate(48, eos=None, temperature=0.4, seed=turn).tokens.tolist()
        question = task.query(key).tolist()
        call = session.update([*text, *thoughts, *question])
        answer = session.generate(4, eos=END).tokens.tolist()
        right = answer == task.answer(value).tolist()
        print(f"turn {turn}: {message.computed:,} of {message.total:,} tokens computed, then")
        print(f"        {call.computed} of {call.total:,}; the answer is right: {right}")
        text += [*question, *answer]  # without the thoughts
        if turn == 2:
            session.save("agent", store=store)
            engine.close()
            engine = kvpager.Engine(model, pool_tokens=16384)
            session = engine.restore("agent", store=store)
    print("another answer:", session.regenerate(4, eos=END, temperature=1.0, seed=1).tokens)
    engine.close()
