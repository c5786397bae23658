"""Replays an allocation trace through vLLM's KVCacheManager and BlockPool (v1).

Task: trace (an .npz of events, tokens, found, pool_chunks, chunk_tokens), runs, hashes ("sha256",
vLLM's default, and "xxhash", its fastest). Answer, for each hash: per run the seconds of each kind
of call, what each event found, and how many names can be found at the end. Requests, and their
token lists, are made before the clock starts; names of blocks are hashed by vLLM's own hasher and
timed apart.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

ARRIVE, GROW, FORK, FINISH = range(4)
LONGEST = 1 << 22


def make_manager(pool: int, block: int) -> Any:
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=16, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=pool + 1,  # one of them is the null block, which is never allocated
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config,
        max_model_len=LONGEST,
        scheduler_block_size=block,
        hash_block_size=block,
        enable_caching=True,
    )


def replay(
    trace: Mapping[str, Any], hasher: Callable[[Any], list[Any]]
) -> tuple[dict[str, float], list[int], int, int]:
    block = int(trace["chunk_tokens"])
    manager = make_manager(int(trace["pool_chunks"]), block)
    pool = manager.block_pool
    tokens = trace["tokens"]
    requests: dict[int, Any] = {}
    seconds = {"hash": 0.0, "look_up": 0.0, "allocate": 0.0, "free": 0.0}
    found: list[int] = []
    calls = 0
    clock = time.perf_counter

    def admit(session: int, prompt: list[int]) -> None:
        nonlocal calls
        request = Request(str(session), prompt, sampling, None)
        requests[session] = request
        start = clock()
        request.block_hashes = hasher(request)
        hashed = clock()
        blocks, hit, _ = manager.get_computed_blocks(request)
        looked = clock()
        given = manager.allocate_slots(request, len(prompt) - hit, hit, blocks)
        done = clock()
        request.num_computed_tokens = len(prompt)
        seconds["hash"] += hashed - start
        seconds["look_up"] += looked - hashed
        seconds["allocate"] += done - looked
        calls += 2
        if given is None:
            raise SystemExit(f"no room for request {session}, which the trace says there is")
        found.append(hit)

    sampling = SamplingParams(max_tokens=LONGEST)
    for kind, _, session, first, count, parent in trace["events"].tolist():
        if kind == ARRIVE:
            admit(session, tokens[first : first + count].tolist())
        elif kind == FORK:
            admit(session, list(requests[parent].all_token_ids))
        elif kind == GROW:
            found.append(0)
            request = requests[session]
            request.append_output_token_ids(tokens[first : first + count].tolist())
            start = clock()
            request.block_hashes.extend(hasher(request))
            hashed = clock()
            given = manager.allocate_slots(request, count)
            done = clock()
            request.num_computed_tokens += count
            seconds["hash"] += hashed - start
            seconds["allocate"] += done - hashed
            calls += 1
            if given is None:
                raise SystemExit(f"no room for request {session}, which the trace says there is")
        else:
            found.append(0)
            start = clock()
            manager.free(requests.pop(session))
            seconds["free"] += clock() - start
            calls += 1
    # Nothing is in use any more: what was named and cannot be found was forgotten.
    assert pool.get_num_free_blocks() == int(trace["pool_chunks"])
    return seconds, found, len(pool.cached_block_hash_to_block), calls


def measure(trace: Mapping[str, Any], name: str, runs: int) -> dict[str, Any]:
    hash_function = get_hash_fn_by_name(name)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(int(trace["chunk_tokens"]), hash_function)
    kept = []
    for run in range(runs + 1):
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection in the middle is no cost of bookkeeping
        seconds, found, cached, calls = replay(trace, hasher)
        gc.enable()
        if run:  # the first one warms
            kept.append(seconds)
    return {"runs": kept, "found": found, "cached": cached, "calls": calls}


def main() -> None:
    task = json.loads(sys.stdin.read())
    with np.load(task["trace"]) as file:
        trace = dict(file)
    print(json.dumps({name: measure(trace, name, task["runs"]) for name in task["hashes"]}))


if __name__ == "__main__":
    main()
