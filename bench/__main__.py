"""The commands of `python -m bench`: the README's tables from results, and the configurations of kernels."""

import argparse
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from rich.console import Console

import kernels_reference
from kernels_reference._config import gpu

from . import _measure, _tune, offline

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- results: written by `python -m bench report` -->", "<!-- end of results -->"
COLUMNS = {
    "eager": "eager",
    "inductor": "Inductor",
    "inductor-max-autotune": "max-autotune",
    "liger": "Liger",
    "helion": "Helion",
    "triton": "Triton",
}
MINE = ("helion", "triton")
NOISE = 1.03
SMALL = 20.0
"""Below as many microseconds a call is of the size of its launch: such cells are compared inside a CUDA graph."""
Cells = dict[str, dict[str, Any]]


def microseconds(found: Cells) -> dict[str, float]:
    """The times of the implementations of one cell: on the GPU, or inside a CUDA graph where all are small and have one."""
    if all(row["device_us"] < SMALL and row["graph_us"] for name, row in found.items() if name != "eager"):
        return {name: row["graph_us"] or row["device_us"] for name, row in found.items()}
    return {name: row["device_us"] for name, row in found.items()}


def speedup(cells: list[Cells], mine: str, other: str) -> str:
    """The geometric mean over the cells that have both."""
    ratios = [times[other] / times[mine] for times in map(microseconds, cells) if mine in times and other in times]
    return f"{geometric_mean(ratios):.2f}" if ratios else "-"


def how_fast(machine: dict[str, Any], cells: dict[tuple[str, str, str], Cells], day: str, dtype: str) -> str:
    """What the times come to, by op and direction; and every cell in which a package is not the fastest."""
    others = [n for n in COLUMNS if n not in MINE and any(n in found for found in cells.values())]
    lines = [
        f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, Triton {machine['triton']}, Helion "
        f"{machine['helion']}; {dtype}, {day}. Copy bandwidth here is {machine['bandwidth'] / 1e12:.2f} TB/s; the floor is the "
        "least traffic at that rate. The speed-up, as a geometric mean over the workloads:",
        "",
        f"| op, direction | {' | '.join(f'{COLUMNS[m]} over {COLUMNS[n]}' for m in MINE for n in others)} |",
        f"|---|{'---:|' * (2 * len(others))}",
    ]
    groups: defaultdict[str, list[Cells]] = defaultdict(list)
    for (op, _, direction), found in sorted(cells.items()):
        groups[f"{op}, {direction}"].append(found)
    groups["**all**"] = list(cells.values())
    for name, group in groups.items():
        lines.append(f"| {name} | {' | '.join(speedup(group, m, n) for m in MINE for n in others)} |")
    lines.append("")
    for mine in MINE:
        there = {key: microseconds(found) for key, found in cells.items() if mine in found and "inductor" in found}
        slower = {k: t[mine] / min(v for n, v in t.items() if n not in MINE) for k, t in there.items()}
        lost = sorted(((ratio, *key) for key, ratio in slower.items() if ratio > NOISE), reverse=True)
        losses = ", ".join(f"{op} {direction} {workload} ({ratio:.2f})" for ratio, op, workload, direction in lost)
        lines += [
            f"{COLUMNS[mine]} is as fast as the fastest of {', '.join(COLUMNS[n] for n in others)}, or faster, in "
            f"{len(slower) - len(lost)} of {len(slower)} rows (3% for noise). "
            + (f"It takes longer, by a factor: {losses}." if lost else ""),
            "",
        ]
    ratio = speedup(list(cells.values()), "triton", "helion")
    lines.append(f"Helion takes {ratio} of Triton's time, as a geometric mean.")
    return "\n".join(lines)


def table(cells: dict[tuple[str, str, str], Cells]) -> str:
    """Every time, the best in bold."""
    columns = {n: title for n, title in COLUMNS.items() if any(n in found for found in cells.values())}
    lines = [
        "Microseconds on the GPU, the L2 cache flushed; where a row is marked, a call's share of a CUDA graph (†).",
        "",
        f"| op, direction | workload | {' | '.join(columns.values())} | floor |",
        f"|---|---|{'---:|' * (len(columns) + 1)}",
    ]
    for (op, workload, direction), found in sorted(cells.items()):
        times = microseconds(found)
        best, digits = min(times.values()), 1 if max(times.values()) < 100 else 0
        mark = "" if all(times[n] == row["device_us"] for n, row in found.items()) else " †"
        some = next(iter(found.values()))
        floor = some["device_us"] * some["percent_of_ceiling"] / 100
        cell = {n: "-" if (t := times.get(n)) is None else f"{t:.{digits}f}" for n in columns}
        shown = [f"**{c}**" if times.get(n) == best else c for n, c in cell.items()]
        lines.append(f"| {op}, {direction} | {workload}{mark} | {' | '.join(shown)} | {floor:.{digits}f} |")
    return "\n".join(lines)


def results(rows: list[dict[str, Any]]) -> str:
    """The summary of a results file, and its table behind a fold."""
    cells: defaultdict[tuple[str, str, str], Cells] = defaultdict(dict)
    for row in rows:
        cells[row["op"], row["workload"], row["direction"]][row["implementation"]] = row
    summary = how_fast(rows[0]["machine"], cells, min(r["date"] for r in rows), rows[0]["dtype"])
    return f"{summary}\n\n<details><summary>All {len(cells)} rows</summary>\n\n{table(cells)}\n\n</details>"


def training(paths: list[Path]) -> str:
    """Tokens a second and peak memory of `examples/train.py`, a row a run."""
    runs = sorted(
        (json.loads(path.read_text()) for path in paths), key=lambda r: (r["size"], r["vocab"], r["tokens_per_second"])
    )
    lines = [
        "Training `examples/llama.py` (`python examples/train.py --json FILE`), bfloat16:",
        "",
        "| model | GPU | tokens | ops | tokens a second | peak memory |",
        "|---|---|---|---|---:|---:|",
    ]
    for r in runs:
        model = f"{r['size']}, {r['parameters'] / 1e9:.2f} B parameters"
        ops = r["ops"] + (", compiled" if r["compile"] else "")
        speed, memory = f"{r['tokens_per_second']:,.0f}", f"{r['peak_memory_bytes'] / 2**30:.1f} GiB"
        lines.append(f"| {model} | {r['device']} | {r['batch']} x {r['length']} | {ops} | {speed} | {memory} |")
    return "\n".join(lines)


def report(paths: list[Path]) -> None:
    tables = [results(_measure.load(path)) for path in paths]
    if runs := sorted((_measure.RESULTS / "train").glob("*.json")):
        tables.append(training(runs))
    if not tables:
        raise ValueError(f"no results in {_measure.RESULTS}; `pytest bench` on a machine with a GPU measures them")
    text = "\n\n".join(tables)
    readme = README.read_text()
    head, _, rest = readme.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise ValueError(f"{README} has no place for results, between {BEGIN!r} and {END!r}")
    _measure.write(README, f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")
    print(text)


def cases(ops: list[str], words: list[str], dtype: str) -> list[Any]:
    """The workloads of these ops, or of all; or one op with these sizes."""
    known = kernels_reference.__all__
    for op in ops:
        if op not in known:
            raise ValueError(f"there is no op {op!r}; there are {', '.join(known)}")
    if words:
        return [_tune.Case(op, " ".join(words), dtype) for op in ops]
    return [_tune.Case(op, workload, dtype) for op in ops or known for workload in _tune.Case(op, "").declaration.workloads]


def tune(chosen: argparse.Namespace) -> None:
    if chosen.shape and not chosen.ops:
        raise ValueError("--shape needs an op")
    if _measure.DEVICE == "cpu":
        raise ValueError("tuning needs a GPU: configurations are chosen by the time that they take there")
    folder: Path | None = chosen.folder
    if folder:
        os.environ["HELION_KERNELS_CONFIGS"] = str(folder)  # So that what is there counts as what is.
    folders = {b: (folder or ROOT) / b / ("" if folder else "configs") for b in offline.BACKENDS}
    console = Console(stderr=True)
    left = _tune.tune(
        cases(chosen.ops, chosen.shape, chosen.dtype),
        chosen.backend or offline.BACKENDS,
        folders,
        budget=chosen.budget,
        again=chosen.again,
        processes=chosen.jobs,
        console=console,
    )
    if left:
        console.print(f"Time is up, and {left} are left: run it again, and it goes on from here.")
    if folder:
        console.print(f"Set HELION_KERNELS_CONFIGS={folder} where these are to be used.")


def config(chosen: argparse.Namespace) -> None:
    where = offline.GPUS[chosen.arch] if chosen.arch else None
    if where is None:
        if _measure.DEVICE == "cpu":
            raise ValueError("there is no GPU here: name one by --arch")
        where = gpu(torch.cuda.current_device())
    for case in cases([chosen.op], chosen.shape, chosen.dtype):
        print(f"{case.op}, {case.what}, {case.dtype}, on {where.name} ({where.arch})")
        for c in _tune.choices(case, chosen.backend or offline.BACKENDS, where):
            name = f"{c['backend']} {c['direction']}: {c['kernel']}, {c['sizes']}"
            print(f"  {name}\n    {'tuned' if c['tuned'] else 'by rule'}: {json.dumps(c['config'])}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("report", help="write the README's tables from results")
    command.add_argument("results", nargs="*", type=Path, help="results files; by default those in bench/results")
    command.set_defaults(run=lambda chosen: report(chosen.results or sorted(_measure.RESULTS.glob("*.json"))))

    shaped = argparse.ArgumentParser(add_help=False)
    text = "an op's arguments, sizes for tensors: --shape x=8192x4096 weight=4096; by default those of all workloads"
    shaped.add_argument("--shape", nargs="+", default=[], metavar="NAME=VALUE", help=text)
    shaped.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    shaped.add_argument("--backend", action="append", choices=offline.BACKENDS, help="by default both")

    command = commands.add_parser("tune", parents=[shaped], help="search configurations on this GPU, and keep the fastest")
    command.add_argument("ops", nargs="*", metavar="OP", help="by default all ops")
    command.add_argument("--budget", type=float, default=600, metavar="SECONDS", help="time for all of it (600)")
    command.add_argument("--folder", type=Path, help="write there, not into the packages")
    command.add_argument("--again", action="store_true", help="tune anew what is tuned already")
    command.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes that compile; 0 for none (one to a core)"
    )
    command.set_defaults(run=tune)

    command = commands.add_parser("config", parents=[shaped], help="print which configuration an op's kernels take")
    command.add_argument("op", metavar="OP")
    command.add_argument("--arch", choices=offline.GPUS, help="a GPU that is elsewhere; by default this machine's")
    command.set_defaults(run=config)

    chosen = parser.parse_args()
    try:
        chosen.run(chosen)
    except (KeyError, OSError, TypeError, ValueError) as error:
        print(f"python -m bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
