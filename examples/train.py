"""Trains a small Llama on the source of the Python standard library, as bytes.

    python examples/train.py                                            a tiny model on a CPU, a small one on a GPU
    python examples/train.py --ops triton --compile --plot loss.png
    python examples/train.py --size 1b --ops helion --json 1b-helion.json

On a GPU, matrices, their gradients and optimizer state are bfloat16, without a float32 copy; on a CPU all is float32.
"""

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

# Threads that spin while they wait slow this model tenfold on a CPU with other work to do.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from llama import SIZES, Llama, load_ops
from torch import Tensor

try:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'helion-kernels[examples]'") from None

DEFAULTS: dict[str, dict[str, Any]] = {
    "tiny": {"steps": 200, "batch": 8, "length": 256, "lr": 3e-3},
    "small": {"steps": 300, "batch": 16, "length": 1024, "lr": 1e-3},
    "1b": {"steps": 20, "batch": 8, "length": 2048, "lr": 3e-4},
}
LOG_EVERY = 10
"""Steps between two looks at the losses: each waits for the GPU."""
UNTIMED = 5
"""The first steps compile kernels and allocate the optimizer's state; no time or peak counts them."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text!r}")
    return int(text)


def rate(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def vocabulary(text: str) -> int:
    if (size := positive(text)) < 256:
        raise argparse.ArgumentTypeError(f"must hold all 256 bytes, got {text!r}")
    return size


def place(text: str) -> torch.device:
    gpus = torch.cuda.device_count()
    if text not in ("cpu", *(f"cuda:{i}" for i in range(gpus)), *(["cuda"] if gpus else [])):
        raise argparse.ArgumentTypeError(f"must be cpu, or cuda or cuda:N for one of {gpus} GPUs, got {text!r}")
    return torch.device(text)


def output(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text!r}")
    return path


def picture(text: str) -> Path:
    if not text.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf, got {text!r}")
    return output(text)


def arguments() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = Parser(description="Train a small Llama on the source of the Python standard library, as bytes.")
    parser.add_argument(
        "--ops", choices=("eager", "helion", "triton", "liger"), help="default: helion on a GPU, eager on a CPU"
    )
    parser.add_argument("--size", choices=tuple(SIZES), help="default: small on a GPU, tiny on a CPU")
    parser.add_argument("--steps", type=positive, help="default: of the size, 20 to 300")
    parser.add_argument("--batch", type=positive, help="sequences a step; default: of the size, 8 or 16")
    parser.add_argument("--length", type=positive, help="bytes a sequence; default: of the size, 256 to 2048")
    parser.add_argument("--vocab", type=vocabulary, default=256, help="more than 256 gives the loss a real model's width")
    parser.add_argument("--lr", type=rate, help="peak learning rate; default: of the size")
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--device", type=place, default=torch.device("cuda" if gpu else "cpu"), help="default: cuda, else cpu")
    parser.add_argument("--compile", action="store_true", help="under torch.compile(fullgraph=True)")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="save a plot of the loss: .png, .svg or .pdf")
    parser.add_argument("--json", type=output, metavar="FILE", help="save what was measured")
    args = parser.parse_args()
    on_gpu = args.device.type == "cuda"
    args.ops = args.ops or ("helion" if on_gpu else "eager")
    args.size = args.size or ("small" if on_gpu else "tiny")
    for name, value in DEFAULTS[args.size].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    try:
        args.module = load_ops(args.ops)
        if args.ops != "eager":
            # An empty call launches nothing, but refuses a device that the kernels cannot run on.
            args.module.swiglu(torch.empty(0, 2, device=args.device))
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    if args.length > 131072:
        parser.error(f"argument --length: must be at most 131072, got {args.length}")
    if args.compile and not on_gpu:
        headers = Path(sysconfig.get_path("include"), "Python.h")
        if not headers.is_file() or not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))):
            parser.error("--compile on a CPU needs a C++ compiler and Python's headers: install g++ and python3-dev")
    return args


def standard_library() -> Tensor:
    """The sources of the standard library without its tests, one after the other: about 11 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests"}
    files = sorted(file for file in root.rglob("*.py") if skip.isdisjoint(file.relative_to(root).parts))
    text = b"".join(file.read_bytes() for file in files)[:20_000_000]
    if len(text) < 1_000_000:
        raise SystemExit(f"train.py: the standard library has no sources to train on in {root}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Batches:
    """Random stretches of a text, as (tokens, the tokens that follow)."""

    def __init__(self, text: Tensor, args: argparse.Namespace, seed: int) -> None:
        self.text, self.device, self.shape = text, args.device, (args.batch, args.length)
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        batch, length = self.shape
        starts = torch.randint(len(self.text) - length, (batch, 1), generator=self.generator)
        tokens = self.text[starts + torch.arange(length + 1)].long()
        if self.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Clock:
    """When each step ended: on a GPU by events, for the host runs ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [a.elapsed_time(b) / 1e3 if self.gpu else b - a for a, b in pairs]


def schedule(step: int, steps: int) -> float:
    """The learning rate over its peak: a linear rise over a tenth of the steps, then a cosine down to a tenth."""
    rise = max(1, steps // 10)
    return min((step + 1) / rise, 0.55 + 0.45 * math.cos(math.pi * max(0, step - rise) / max(1, steps - rise)))


def train(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Trains as told, and returns what was measured."""
    gpu = args.device.type == "cuda"
    if gpu and args.device.index is not None:
        torch.cuda.set_device(args.device)
    text = standard_library()
    held_out = len(text) // 20
    batches = Batches(text[:-held_out], args, args.seed)

    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if gpu else torch.float32
    config = replace(SIZES[args.size], vocab=args.vocab, length=args.length, dtype=dtype)
    with args.device:
        model = Llama(config, args.module)
    # With a beta2 of 0.999, squares of gradients would be averaged in steps that bfloat16 rounds away.
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, args.steps))
    run: Any = torch.compile(model, fullgraph=True) if args.compile else model

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    losses: list[float] = []
    untimed = min(UNTIMED, args.steps - 1)
    clock = Clock(args.device)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling" if args.compile else "training", total=args.steps)
        pending: list[Tensor] = []
        clock.mark()
        seen, since = 0, time.perf_counter()
        for step in range(args.steps):
            if gpu and step == untimed:
                torch.cuda.reset_peak_memory_stats()
            loss = run(*batches.next())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            clock.mark()
            pending.append(loss.detach())
            if len(pending) == LOG_EVERY or step in (0, args.steps - 1):
                losses += torch.stack(pending).tolist()
                pending.clear()
                now = time.perf_counter()
                speed = (len(losses) - seen) * args.batch * args.length / (now - since)
                seen, since = len(losses), now
                progress.update(task, completed=seen, description=f"loss {losses[-1]:.3f}  {speed:,.0f} tokens/s")
        peak = torch.cuda.max_memory_allocated() if gpu else None
    seconds = statistics.median(clock.seconds()[untimed:])

    unseen = Batches(text[-held_out:], args, seed=0)
    with torch.no_grad():
        # Not the compiled model, which would compile once more for a forward without gradients.
        validation = statistics.fmean(model(*unseen.next()).item() for _ in range(8))
    return {
        **{name: getattr(args, name) for name in ("ops", "compile", "size", "vocab", "batch", "length", "steps", "lr", "seed")},
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "text_bytes": len(text),
        "step_seconds": seconds,
        "tokens_per_second": args.batch * args.length / seconds,
        "peak_memory_bytes": peak,
        "validation_loss": validation,
        "losses": losses,
        **environment(args.device),
    }


def environment(device: torch.device) -> dict[str, Any]:
    gpu = device.type == "cuda"
    driver = None
    if gpu and (tool := shutil.which("nvidia-smi")):
        query = subprocess.run([tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
        driver = next(iter(query.stdout.split()), None)
    return {
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "driver": driver,
        "versions": {"python": platform.python_version(), **{name: installed(name) for name in ("torch", "triton", "helion")}},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def summary(result: Mapping[str, Any]) -> Table:
    table = Table(show_header=False)
    peak = result["peak_memory_bytes"]
    rows = {
        "ops": result["ops"] + (", compiled" if result["compile"] else "") + f", on {result['device']}",
        "model": f"{result['size']}, {result['parameters']:,} parameters, {result['dtype']}",
        "steps": f"{result['steps']} of {result['batch']} x {result['length']} tokens",
        "training loss": f"{result['losses'][0]:.3f} at the first step, {result['losses'][-1]:.3f} at the last",
        "validation loss": f"{result['validation_loss']:.3f}, on text held out",
        "speed": f"{result['tokens_per_second']:,.0f} tokens/s, {1e3 * result['step_seconds']:,.1f} ms a step (median)",
        **({} if peak is None else {"peak memory": f"{peak / 2**30:.2f} GiB"}),
    }
    for row in rows.items():
        table.add_row(*row)
    return table


def plot(result: Mapping[str, Any], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(result["losses"]) + 1), result["losses"], linewidth=1, label="training")
    axes.axhline(result["validation_loss"], color="gray", linestyle="--", linewidth=1, label="validation, at the end")
    axes.set(xlabel="step", ylabel="cross-entropy (nats a byte)", title=f"{result['size']}, {result['ops']} ops")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    args = arguments()
    console = Console()
    try:
        result = train(args, console)
    except torch.OutOfMemoryError:
        raise SystemExit("train.py: error: out of GPU memory: lower --batch, --length or --vocab") from None
    console.print(summary(result))
    if args.plot:
        plot(result, args.plot)
        console.print(f"saved {args.plot}")
    if args.json:
        # Written whole or not at all: a reader never meets half a file.
        unfinished = args.json.with_name(f".{args.json.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(result, indent=2) + "\n")
        os.replace(unfinished, args.json)
        console.print(f"saved {args.json}")


if __name__ == "__main__":
    main()
