"""Rebuild the generated parts of README.md from the rows in the repo: `make tables`.

Each part stands between `<!-- NAME -->` and `<!-- /NAME -->`. Nothing is measured here.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import faster

ROOT = Path(__file__).resolve().parent.parent
OVERVIEW = ROOT / "experiments" / "overview"
BENCH = ROOT / "benchmarks" / "results"


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text("utf-8")
    for name, part in (("overview", overview()), ("faster", faster.section()), ("speed", speed())):
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
        if not pattern.search(text):
            raise SystemExit(f"README.md has no place for {name}")
        text = pattern.sub(lambda m, part=part: m[1] + part + m[2], text)
    readme.write_text(text, "utf-8")


def overview() -> str:
    """The sweep's table and plots."""
    from kvlab.report import combine, table

    results, _ = combine.load([OVERVIEW / "runs"])
    combined = combine.combine(results)
    combine.write(combined, OVERVIEW)
    for name in ("pareto", "ledger"):
        (OVERVIEW / f"{name}.csv").unlink(missing_ok=True)
    one = results[0][1]
    lines = [
        f"{combined.caption}, {one['threads']} threads, {one['host']['cpu']}.",
        "",
        table.markdown(combined.summary).strip(),
        "",
    ]
    return "\n".join(lines) + "\n"


def speed() -> str:
    """Ratios of the benchmark rows."""
    out = ["| benchmark | batch x context | side | ms | x transformers | rounds |", "|:--|:--|:--|--:|--:|--:|"]
    for name in ("decode", "continuous", "prefill"):
        path = BENCH / f"{name}.jsonl"
        for row in map(json.loads, path.read_text().splitlines() if path.exists() else []):
            peer = row["side"] == row["peer"]
            out.append(
                f"| {name} | {row['batch']} x {row['context']:,} | {row['side']} | {row['ms_median']:,.1f} | "
                f"{'' if peer else format(row['ratio'], '.2f')} | {row['rounds']} |"
            )
    return "\n".join(out) + "\n"


def collect(sweep: Path) -> None:
    """Copy the result files of a sweep's run folders to experiments/overview/runs."""
    target = OVERVIEW / "runs"
    shutil.rmtree(target, ignore_errors=True)
    for path in sorted(sweep.glob("*/result.json")):
        name = path.parent.name.split("-", 1)[1]
        (target / name).mkdir(parents=True)
        shutil.copy(path.parent / "documents.jsonl", target / name)
        result = json.loads(path.read_text("utf-8"))
        result["config"]["out"] = "outputs"  # where it was written is this machine's business, and not in the hash
        result["overrides"] = [o for o in result["overrides"] if not o.startswith("out=")]
        (target / name / "result.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    import sys

    if len(sys.argv) > 1:
        collect(Path(sys.argv[1]))
    main()
