"""sglang-router between a client and the server, which it takes for a worker of its own."""

from __future__ import annotations

from trials import free_port, main, router, use_every_api


def try_every_api_through_the_router(url):
    worker = (
        "--worker-urls",
        url,
        "--policy",
        "cache_aware",
        "--prometheus-port",
        str(free_port()),
    )
    with router("sglang_router.launch_router", *worker) as routed:
        use_every_api(routed)


if __name__ == "__main__":
    main(globals())
