"""lm_eval: log-likelihoods and answers by local-completions and local-chat-completions."""

from __future__ import annotations

import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from trials import MODEL, main


def try_log_likelihoods_and_answers_of_completions(url):
    model = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model=MODEL,
        tokenizer=sys.argv[2],
        num_concurrent=1,
    )
    texts = [("import os\nimport ", "re"), ("import os\nimport ", "zebra")]
    found = model.loglikelihood(
        [Instance("loglikelihood", {}, text, i) for i, text in enumerate(texts)]
    )
    assert all(log_probability < 0 for log_probability, _ in found)
    ask = Instance("generate_until", {}, ("import os", {"until": ["\n\n"], "max_gen_toks": 8}), 0)
    assert isinstance(model.generate_until([ask])[0], str)


def try_answers_of_chat(url):
    model = LocalChatCompletion(
        base_url=f"{url}/v1/chat/completions", model=MODEL, num_concurrent=1
    )
    prompt = model.apply_chat_template([{"role": "user", "content": "Write a class."}])
    ask = Instance("generate_until", {}, (prompt, {"until": ["\n\n"], "max_gen_toks": 8}), 0)
    assert isinstance(model.generate_until([ask])[0], str)


if __name__ == "__main__":
    main(globals())
