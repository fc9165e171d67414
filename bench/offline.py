"""Compiles kernels for GPUs that this machine does not have: `python -m bench.offline sm_80,sm_90 [OP ...]` prints JSON.

The host functions of both packages run on fake CUDA tensors while the chosen GPU is stood in for; Triton compiles what
they launch, and launches nothing. One process serves GPUs of one vendor, and not Triton's interpreter, since Triton and Helion
decide once for which of these they are there.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from helion._compiler.compile_environment import CompileEnvironment
from torch import Tensor
from torch._inductor.runtime.hints import DeviceProperties
from torch._prims_common import wrappers
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

from kernels_reference._config import Gpu, Tunable
from kernels_reference._config import gpu as known_gpu
from kernels_reference._draw import Draw
from kernels_reference._op import Op

GPUS = {
    gpu.arch: gpu
    for gpu in (
        Gpu("NVIDIA A100-SXM4-80GB", "sm_80", 108, 163 << 10, 32),
        Gpu("NVIDIA L4", "sm_89", 58, 99 << 10, 32),
        Gpu("NVIDIA H200", "sm_90", 132, 227 << 10, 32),
        Gpu("NVIDIA B200", "sm_100", 148, 227 << 10, 32),
        Gpu("NVIDIA GeForce RTX 5090", "sm_120", 170, 99 << 10, 32),
        Gpu("AMD Instinct MI300X", "gfx942", 304, 64 << 10, 16),
    )
}


BACKENDS = ("kernels_helion", "kernels_triton")
NVIDIA = ",".join(arch for arch in GPUS if arch.startswith("sm_"))
NUMBERS: dict[Gpu, int] = {}


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled: registers a thread, bytes spilled a thread, bytes of shared memory a block."""

    arch: str
    op: str
    backend: str
    direction: str
    workload: str
    kernel: str
    registers: int
    spilled: int
    shared: int
    warps: int
    source: str


@contextlib.contextmanager
def stand_in(gpu: Gpu, *, compiles: bool = True) -> Generator[list[Any]]:
    """Pretends that this GPU is there; yields the list that kernels are added to when code launches them."""
    arch, amd, warp = gpu.arch, gpu.arch.startswith("gfx"), 1024 // gpu.warps
    major, minor = (9, 4) if amd else divmod(int(arch.removeprefix("sm_")), 10)
    target = GPUTarget("hip", arch, warp) if amd else GPUTarget("cuda", major * 10 + minor, warp)
    properties = SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        multi_processor_count=gpu.processors,
        warp_size=warp,
        gcnArchName=f"{arch}:sramecc+:xnack-" if amd else "",
        total_memory=80 << 30,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=gpu.shared,
        shared_memory_per_block_optin=gpu.shared,
        shared_memory_per_multiprocessor=gpu.shared + 1024,
        L2_cache_size=50 << 20,
    )
    inductor = DeviceProperties(
        type="hip" if amd else "cuda",
        index=0,
        multi_processor_count=gpu.processors,
        cc=arch if amd else major * 10 + minor,  # type: ignore[arg-type]
        major=major,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        warp_size=warp,
    )
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        # Triton keeps what it compiled by the number of the device.
        get_current_device=lambda: NUMBERS.setdefault(gpu, len(NUMBERS)),
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not compiles:
            return None
        mocked = [MockTensor(a.dtype, list(a.shape)) if isinstance(a, Tensor) else a for a in args]
        kernel = run(self, *mocked, grid=grid, warmup=True, **options)
        compiled.append(kernel)
        return kernel

    recreate = CompileEnvironment._maybe_recreate_symint

    def symbolic(self: Any, size: Any, source: Any) -> Any:
        """Helion takes a fake tensor's sizes for constants; a real tensor's are not, unless they are 1."""
        if not isinstance(size, int) or self.settings.static_shapes:
            return recreate(self, size, source)
        symbol = self.shape_env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC)
        return self.shape_env.create_symintnode(symbol, hint=size, source=source)

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "is_initialized", lambda: True),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_capability", lambda device=None: (major, minor)),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch.cuda, "get_device_name", lambda device=None: gpu.name),
            (torch.version, "cuda", None if amd else "12.8"),
            (torch.version, "hip", "6.4" if amd else None),
            (DeviceProperties, "create", staticmethod(lambda device: inductor)),
            (triton.runtime.driver, "_active", driver),
            (JITFunction, "run", compile_only),
            (CompileEnvironment, "_maybe_recreate_symint", symbolic),
            (fake_tensor, "init_gpu_context", lambda device: None),
            # Copies between fake tensors would ask for a GPU's; there is nothing to copy.
            (wrappers, "_safe_copy_out", lambda *, copy_from, copy_to, exact_dtype=False: copy_to),
            (Tensor, "copy_", lambda self, *_: self),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        known_gpu.cache_clear()
        yield compiled
    known_gpu.cache_clear()


def resources(kernel: Any) -> tuple[int, int]:
    """Registers a thread, and bytes a thread spills to memory."""
    if "amdgcn" in kernel.asm:
        found = dict(
            re.findall(r"\.(vgpr_count|[sv]gpr_spill_count|private_segment_fixed_size):\s*(\d+)", kernel.asm["amdgcn"])
        )
        return int(found["vgpr_count"]), 4 * int(found["vgpr_spill_count"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])


def on_cuda(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with tensors on the GPU, fake ones while a GPU is stood in for."""
    return {
        name: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="cuda") if isinstance(v, Tensor) else v
        for name, v in arguments.items()
    }


def load(op: str) -> Op[Any]:
    return importlib.import_module(f"kernels_reference.{op}").op


def function(op: str, backend: str) -> Any:
    return getattr(importlib.import_module(f"{backend}.{op}"), op)


def tunables(op: str, backend: str) -> dict[str, Tunable]:
    """The kernels of an op that have configurations, by name."""
    of = vars(importlib.import_module(f"{backend}.{op}")).values()
    return {t.name: t for t in of if isinstance(t, Tunable)}


def walk(op: Op[Any], backend: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Runs the kernels of an op, each with a configuration chosen anew, and says after each direction which it was."""
    for tunable in tunables(op.name, backend).values():
        tunable.forget()
    kernels = function(op.name, backend).kernels
    bound = zip(op.arguments.names, op.arguments.bind((), arguments), strict=True)
    values = [v for n, v in bound if n in kernels.names]
    needs = tuple(isinstance(values[i], Tensor) for i in kernels.differentiable)
    results = kernels.run_forward(*values, *([needs] if kernels.ahead else []))
    yield "forward"
    if kernels.backward is not None:
        known = dict(zip((*kernels.names, *kernels.made), (*values, *results), strict=True))
        grads = [known[name.removeprefix("grad_")] for name in kernels.incoming]
        kernels.run_backward(*grads, *(known[name] for name in kernels.saved), needs)
        yield "backward"


def compile_op(op: Op[Any], backend: str, gpu: Gpu, workload: str, arguments: Mapping[str, Any]) -> list[Compiled]:
    """What the forward and the backward of an op launch with such arguments, compiled for a GPU."""
    found: list[Compiled] = []
    with stand_in(gpu) as compiled, FakeTensorMode():
        for direction in walk(op, backend, on_cuda(arguments)):
            for kernel in {id(k): k for k in compiled}.values():  # What is launched twice is compiled once.
                m, source = kernel.metadata, kernel.src.fn.fn.__code__.co_filename
                cell = gpu.arch, op.name, backend, direction, workload, m.name
                found.append(Compiled(*cell, *resources(kernel), m.shared, m.num_warps, source))
            compiled.clear()
    return found


def in_child(arch: str, *ops: str) -> list[dict[str, Any]]:
    """What this command prints, from a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.offline", arch, *ops]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", help=f"of {', '.join(GPUS)}: one, or several of one vendor with commas between")
    parser.add_argument("ops", nargs="*", metavar="OP")
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--turns", action="store_true", help="each workload for one GPU in five, in turns")
    chosen = parser.parse_args()
    import kernels_reference

    for name in chosen.ops or kernels_reference.__all__:
        op = load(name)
        for backend in chosen.backend or BACKENDS:
            for turn, workload in enumerate(op.workloads):
                arguments = op.workloads[workload](Draw("meta", torch.bfloat16))
                for i, arch in enumerate(chosen.arch.split(",")):
                    if chosen.turns and (turn + i) % 5:
                        continue
                    for line in compile_op(op, backend, GPUS[arch], workload, arguments):
                        print(json.dumps(asdict(line)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
