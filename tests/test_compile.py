"""Every kernel, at the shapes of workloads, compiled for GPUs that need not be here."""

import pytest

from bench import offline

from . import _ops


@pytest.mark.parametrize("architectures", [offline.NVIDIA, "gfx942"])
def test_compiles_without_spills(architectures: str) -> None:
    """Workloads and GPUs take turns, or this would be half of all tests' time; `python -m bench.offline` compiles all."""
    compiled = offline.in_child(architectures, "--turns")
    every = {(arch, n, b) for arch in architectures.split(",") for n in _ops.NAMES for b in _ops.BACKENDS}
    assert {(line["arch"], line["op"], line["backend"]) for line in compiled} == every
    spilled = [line for line in compiled if line["spilled"]]
    assert not spilled
    assert not [line for line in compiled if line["shared"] > offline.GPUS[line["arch"]].shared]
