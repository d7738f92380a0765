"""Write docs/performance.md from a benchmark run: `python -m benchmarks.render results.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "docs" / "performance.md"

HEAD = """# Performance

Measured by `make bench`, written by `python -m benchmarks.render` from [performance.json](performance.json).

{machine}

A ratio is the time over that of a plain copy of the same bytes: the trainer's own tensors, copied to a populated buffer by
two threads with streaming stores (the fastest loop we have; no digest). The two are taken in turn, and the median
of the ratios of a run is given. The machine is noisy: compare ratios, not seconds. In each run the received bytes were
compared with the published ones by an independent CRC, and a wrong byte fails the run. Loopback is not a network.
"""


def rows_of(data: dict[str, Any], group: str) -> list[tuple[str, dict[str, Any]]]:
    return [(b["name"], b["extra_info"]) for b in data["benchmarks"] if (b["group"] or "").startswith(group)]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def label(name: str) -> str:
    return name.partition("[")[2].rstrip("]") or name.removeprefix("test_")


def sync_table(data: dict[str, Any], group: str) -> str:
    rows = [
        [
            label(name), f"{i['median_s'] * 1e3:.1f}", f"{i['min_s'] * 1e3:.1f}", f"{i['gib_per_s']:.2f}",
            f"{i['plain_copy_s'] * 1e3:.1f}", f"**{i['ratio']:.2f}**",
            f"{i['ratio_of_minima']:.2f}",
            f"{i['stage_s'] * 1e3:.1f}", f"{i['read_s'] * 1e3:.1f}",
            f"{i['pause_p50_us']:.0f} / {i['pause_p99_us']:.0f}", str(i["wrong"]),
        ]
        for name, i in rows_of(data, group)
    ]  # fmt: skip
    head = ["case", "publish to live, ms", "best", "GiB/s", "plain copy, ms", "ratio", "ratio of bests", "publish() ms",
            "read ms", "pause p50 / max, µs", "wrong"]  # fmt: skip
    return table(head, rows)


def core_table(data: dict[str, Any]) -> str:
    rows = [
        [
            label(name),
            i["what"],
            str(i["threads"]),
            f"{i['median_s'] * 1e3:.1f}",
            f"**{i['ratio']:.2f}**",
            f"{i['ratio_of_minima']:.2f}",
        ]
        for name, i in rows_of(data, "core")
    ]
    return table(["case", "what", "threads", "median ms", "ratio", "ratio of bests"], rows)


def relay_part() -> list[str]:
    """What `python -m benchmarks.relay_scaling --json docs/relay_scaling.json` found, if it was run."""
    source = TARGET.with_name("relay_scaling.json")
    if not source.exists():
        return []
    data = json.loads(source.read_text())
    rows = [
        [
            str(row["servers"]),
            row["relay"],
            f"**{row['egress_copies']:.2f}**",
            f"{row['ready_s']:.2f}",
            f"**{row['times_alone']:.2f}**",
            str(row["wrong"]),
        ]
        for row in data["rows"]
    ]
    head = [
        "servers",
        "relay",
        "copies that left the trainer",
        "ready after, s",
        "over one server alone",
        "wrong",
    ]
    return [
        "## Relay: one trainer, more and more servers\n",
        f"{data['mib']} MiB in 128 tensors over `zmq`; trainer and servers in network namespaces of their own, each with "
        f"a link of {data['mbit']} Mbit/s both ways. Egress is counted at the trainer's interface.\n",
        table(head, rows),
    ]


def main() -> None:
    data = json.loads(Path(sys.argv[1]).read_text())
    cpu, machine = data["machine_info"]["cpu"], data["machine_info"]
    line = (
        f"{cpu.get('brand_raw', 'unknown CPU')}, {cpu.get('count')} cores, {machine['system']} {machine['release']}, "
        f"Python {machine['python_version']}, {data['datetime'][:10]}."
    )
    parts = [HEAD.format(machine=line)]
    parts += [
        "## One GiB, 147 bf16 tensors, from `publish()` to live in another process\n",
        sync_table(data, "sync 1 GiB"),
    ]
    parts += ["## 40 MiB as many and as one\n", sync_table(data, "sync 40 MiB")]
    ranks = [
        [
            f"{i['trainers']} to {i['servers']}", str(i["tensors"]), f"{i['bytes'] / 2**20:.0f}",
            f"{i['median_s'] * 1e3:.0f}", f"{i['p99_s'] * 1e3:.0f}", f"{i['plain_copy_s'] * 1e3:.0f}",
            f"**{i['ratio']:.2f}**", f"{i['moved_over_needed']:.3f}", str(i["wrong"]),
        ]
        for _, i in rows_of(data, "sync by ranks")
    ]  # fmt: skip
    if ranks:
        parts += [
            "## Trainer ranks that hold rows, server ranks that want columns\n",
            "All processes share the same two cores. `moved / needed`: bytes the server ranks read, over those they want.\n",
            table(
                [
                    "ranks",
                    "tensors",
                    "MiB",
                    "publish to live, ms",
                    "p99",
                    "plain copy, ms",
                    "ratio",
                    "moved / needed",
                    "wrong",
                ],
                ranks,
            ),
        ]
    commits = [
        [
            str(i["ranks"]),
            f"{i['ready_ms']:.2f}",
            f"**{i['commit_ms']:.2f}**",
            f"{i['commit_p99_ms']:.2f}",
        ]
        for _, i in rows_of(data, "replica commit")
    ]
    if commits:
        parts += [
            "## Commit of a replica, a model of 128 bytes\n",
            "From all ranks verified to all ranks switched, ranks driven by one engine; 1: a server that need not vote.\n",
            table(["ranks", "publish to ready, ms", "commit and switch, ms", "p99"], commits),
        ]
    pauses = [
        [label(name), str(i["tensors"]), f"{i['pause_p50_us']:.0f}", f"{i['pause_p99_us']:.0f}"]
        for name, i in rows_of(data, "swap")
    ]
    parts += [
        "## Swap pause of `remap`, 200 swaps\n",
        table(["model", "tensors", "p50 µs", "p99 µs"], pauses),
    ]
    steps = [b for b in data["benchmarks"] if b["group"] == "step"]
    if steps:
        parts.append(
            f"`with sub.step()` without a pending version: {steps[0]['stats']['median'] * 1e6:.2f} µs (median).\n"
        )
    iperf = rows_of(data, "zmq against")
    if iperf:
        i = iperf[0][1]
        parts += [
            "## `zmq` over loopback\n",
            f"A late joiner reads a sealed slot at {i['read_gib_per_s']:.2f} GiB/s, verified, into its "
            f"back buffer; iperf3 with as many streams moves "
            f"{i['iperf3_gib_per_s']:.2f} GiB/s and throws the bytes away: **{i['of_iperf3']:.2f}** of it.\n",
        ]
    parts += relay_part()
    parts += ["## Native core, 1 GiB read\n", core_table(data)]
    notes = TARGET.with_name("performance_notes.md")
    if notes.exists():
        parts.append(notes.read_text())
    TARGET.write_text("\n".join(parts))
    Path(TARGET.with_suffix(".json")).write_text(json.dumps(slim(data), indent=1) + "\n")


def slim(data: dict[str, Any]) -> dict[str, Any]:
    """What the tables need, without host names and raw samples."""
    machine = {key: data["machine_info"][key] for key in ("system", "release", "python_version")}
    cpu = {key: data["machine_info"]["cpu"].get(key) for key in ("brand_raw", "count")}
    benchmarks = [
        {
            "name": b["name"],
            "group": b["group"],
            "extra_info": b["extra_info"],
            "stats": {"median": b["stats"]["median"]},
        }
        for b in data["benchmarks"]
    ]
    return {"datetime": data["datetime"], "machine_info": machine | {"cpu": cpu}, "benchmarks": benchmarks}


if __name__ == "__main__":
    main()
