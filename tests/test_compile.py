"""Every kernel, at the shapes of every workload, compiled for GPUs that need not be here."""

import pytest

from bench import offline

from . import _ops


@pytest.mark.parametrize("architecture", offline.GPUS)
def test_compiles_without_spills(architecture: str) -> None:
    compiled = offline.in_child(architecture)
    assert {(line["op"], line["backend"]) for line in compiled} == {(n, b) for n in _ops.NAMES for b in _ops.BACKENDS}
    spilled = [line for line in compiled if line["spilled"]]
    assert not spilled
    assert not [line for line in compiled if line["shared"] > offline.GPUS[architecture].shared]
