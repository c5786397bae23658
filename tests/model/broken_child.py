"""`kvpager.verify.child` with one property broken, named by KVPAGER_BROKEN; for tests alone."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch

from kvpager._runtime.scheduling.score import Score
from kvpager.engine import Engine
from kvpager.pager import Forward
from kvpager.sampling import log_probability
from kvpager.verify import child


def score_by_decoding(engine, ids, progress=None):
    """The same bits as a teacher-forced run, but by the very way that it is to be compared with."""
    session = engine.session()
    session.prefill(ids[:1])
    logprobs = []
    for token in ids[1:]:
        logprobs.append(log_probability(session.logits, int(token)))
        session.append([int(token)])
    return Score(tokens=ids, logprobs=np.array(logprobs, dtype=np.float32))


def nudged_keys(forward, layer, q, k, v, **call):
    """One key of layer 1 is one ulp off in every forward of the process."""
    if layer == 1:
        k = k.clone()
        k[0, 0, 0] = torch.nextafter(k[0, 0, 0], torch.tensor(torch.inf, dtype=k.dtype))
    return attend(forward, layer, q, k, v, **call)


attend = Forward.attend
if os.environ["KVPAGER_BROKEN"] == "score":
    Engine.score = score_by_decoding
elif os.environ["KVPAGER_BROKEN"] == "kernels":
    Forward.attend = nudged_keys

if __name__ == "__main__":
    sys.exit(child.main(sys.argv[1:]))
