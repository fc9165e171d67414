"""`python -m bench report`: the README's tables, from measured results."""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from . import _measure

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- results: written by `python -m bench report` -->", "<!-- end of results -->"
COLUMNS = {
    "eager": "eager",
    "inductor": "Inductor",
    "inductor-max-autotune": "max-autotune",
    "helion": "Helion",
    "triton": "Triton",
}


def table(rows: list[dict[str, Any]]) -> str:
    """Device time by op, workload and direction; the best in bold; how often each package is the fastest."""
    cells: defaultdict[tuple[str, str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        cells[row["op"], row["workload"], row["direction"]][row["implementation"]] = row
    machine = rows[0]["machine"]
    lines = [
        f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, Triton {machine['triton']}, Helion "
        f"{machine['helion']}; {rows[0]['dtype']}, {min(r['date'] for r in rows)}. Device time in microseconds, L2 cache "
        f"flushed; copy bandwidth here is {machine['bandwidth'] / 1e12:.2f} TB/s. The floor is the least traffic at that rate.",
        "",
        f"| op, direction | workload | {' | '.join(COLUMNS.values())} | floor |",
        f"|---|---|{'---:|' * (len(COLUMNS) + 1)}",
    ]
    for (op, workload, direction), found in sorted(cells.items()):
        times = {n: row["device_us"] for n, row in found.items()}
        best = min(times.values())
        some = next(iter(found.values()))
        floor = some["device_us"] * some["percent_of_ceiling"] / 100
        shown = [f"**{t:.0f}**" if (t := times.get(n)) == best else "-" if t is None else f"{t:.0f}" for n in COLUMNS]
        lines.append(f"| {op}, {direction} | {workload} | {' | '.join(shown)} | {floor:.0f} |")
    lines += [
        "",
        "Geometric mean of the speed-up over all rows:",
        "",
        "| | over eager | over Inductor | over max-autotune |",
        "|---|---:|---:|---:|",
    ]
    for mine in ("helion", "triton"):
        means: list[str] = []
        for other in ("eager", "inductor", "inductor-max-autotune"):
            ratios = [f[other]["device_us"] / f[mine]["device_us"] for f in cells.values() if mine in f and other in f]
            means.append(f"{geometric_mean(ratios):.2f}" if ratios else "-")
        lines.append(f"| {COLUMNS[mine]} | {' | '.join(means)} |")
    return "\n".join(lines)


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
    tables = [table(_measure.load(path)) for path in paths]
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("report", help="write the README's tables from results")
    command.add_argument("results", nargs="*", type=Path, help="results files; by default those in bench/results")
    chosen = parser.parse_args()
    paths = chosen.results or sorted(p for p in _measure.RESULTS.glob("*.json"))
    try:
        report(paths)
    except (KeyError, OSError, ValueError) as error:
        print(f"python -m bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
