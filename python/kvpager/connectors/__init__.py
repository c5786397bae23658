"""kvpager's stores inside other engines: checked disk tiers for vLLM, LMCache and SGLang.

The modules `vllm`, `lmcache` and `sglang` import what they are named after, which alone imports
them.
"""

from __future__ import annotations

import contextlib

VLLM_CONNECTOR = "KvpagerConnector"


def register_vllm() -> None:
    """Makes `"kv_connector": "KvpagerConnector"` known to vLLM: its plugin `kvpager`."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(
            VLLM_CONNECTOR, "kvpager.connectors.vllm", VLLM_CONNECTOR
        )
