"""A router (vllm-router or sglang-router) in front of the server, which it takes for its worker."""

from __future__ import annotations

from importlib.util import find_spec

from trials import free_port, main, router, use_every_api

INSTALLED = next((name for name in ("vllm_router", "sglang_router") if find_spec(name)), "")


def try_every_api_through_the_router(url):
    worker = ("--worker-urls", url, "--policy", "cache_aware")
    ports = ("--prometheus-port", str(free_port()))
    with router(f"{INSTALLED}.launch_router", *worker, *ports) as routed:
        use_every_api(routed)


if __name__ == "__main__":
    main(globals())
