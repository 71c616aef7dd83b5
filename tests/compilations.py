"""Counts of compilations."""

from collections.abc import Callable
from typing import Any

import jax


def compiles_again(call: Callable[[], object]) -> bool:
    """Return whether a second equal call compiles a function, like the first after
    `jax.clear_caches`."""
    compiled: list[str] = []

    def listen(event: str, _: float, **__: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call()
        first = len(compiled)
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert first > 0
    return len(compiled) > first
