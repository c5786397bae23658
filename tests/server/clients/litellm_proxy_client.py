"""litellm's proxy between a client and the server: OpenAI's APIs and Anthropic's, with streams."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from trials import MODEL, main, post, router, use_every_api

CONFIG = """
model_list:
  - model_name: coder
    litellm_params: {{model: openai/{model}, api_base: {url}/v1, api_key: none}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""


def try_every_api_through_the_proxy(url):
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG.format(model=MODEL, url=url), encoding="utf-8")
        options = ("--config", str(config))
        with router("litellm.proxy.proxy_cli", *options, path="/health/liveliness") as proxy:
            use_every_api(proxy, "coder")
            user = [{"role": "user", "content": "Sort."}]
            ask = {"model": "coder", "messages": user, "max_tokens": 8}
            assert json.loads(post(f"{proxy}/v1/messages", ask))["content"][0]["text"]


if __name__ == "__main__":
    main(globals())
