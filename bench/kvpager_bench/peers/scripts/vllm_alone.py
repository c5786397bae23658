"""A conversation with vLLM in a fresh process.

task: folder (of the model), threads, longest (context), prompt (a file of its ids), steps, runs.
Answers as `conversation.held`. A turn's tokens are computed behind what the prefix cache has; the
time of one token, which looks the prompt up, is taken off.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from conversation import held, prompt_of, seconds


def main(task: dict[str, Any]) -> dict[str, Any]:
    os.environ |= {
        "OMP_NUM_THREADS": str(task["threads"]),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, the least
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    import vllm

    model = vllm.LLM(
        task["folder"],
        dtype="bfloat16",
        max_model_len=task["longest"],
        enable_prefix_caching=True,
        disable_log_stats=True,
    )

    ids = prompt_of(task)

    def generate(tokens: int) -> None:
        settings = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        model.generate({"prompt_token_ids": ids}, settings, use_tqdm=False)

    answer: dict[str, Any] = held(task, lambda: generate(1), lambda: generate(task["steps"]))
    one = min(seconds(lambda: generate(1)) for _ in range(task["runs"]))
    steps = task["steps"]
    decode = [answer["first_turn_s"], *answer["decode_s"]]
    answer["first_turn_s"], *answer["decode_s"] = [
        (each * steps - one) / (steps - 1) for each in decode
    ]
    return answer


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
