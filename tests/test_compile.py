"""Every kernel, at the shapes of every workload, compiled for GPUs that need not be here."""

import pytest

from bench.offline import GPUS

from . import _offline, _ops


@pytest.mark.parametrize("architecture", GPUS)
def test_compiles_without_spills(architecture: str) -> None:
    compiled = _offline.FUTURES[architecture].result()
    assert {(line["op"], line["backend"]) for line in compiled} == {(n, b) for n in _ops.NAMES for b in _ops.BACKENDS}
    spilled = [line for line in compiled if line["spilled"]]
    assert not spilled
    assert not [line for line in compiled if line["shared"] > GPUS[architecture].shared]
