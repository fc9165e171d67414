"""Compilation for GPUs that are not here, in processes of its own, beside the tests that run."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from bench import offline

FUTURES: dict[str, "Future[list[dict[str, Any]]]"] = {}


def start(architectures: Sequence[str]) -> None:
    """One process on a machine with two cores, so that it goes on testing."""
    pool = ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 2) // 2))
    FUTURES.update({name: pool.submit(offline.in_child, name) for name in architectures})
    pool.shutdown(wait=False)
