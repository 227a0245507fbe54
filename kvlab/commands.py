"""Small subcommands: look things up, report, compare, verify. Torch is imported only by `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="KV-cache compression research.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def methods() -> None:
    """List every method: name, what it does, one command."""
    from kvlab import names

    _list(names.FOLDER)
    typer.echo("Pipelines: a pruner + a quantizer, python -m kvlab +method=snapkv+turboquant")


@app.command()
def tasks() -> None:
    """List every task: name, what it measures, its options with their defaults."""
    _list(Path(__file__).parent / "configs" / "task", options=True)


def _list(folder: Path, options: bool = False) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvlab import names

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for path in sorted(folder.glob("*.yaml")):
        about, command = names.about(path)
        lines = [line.rstrip() for line in path.read_text("utf-8").splitlines() if options and not line.startswith("#")]
        text = Text("\n").join([*([Text(about)] if about else []), Text(command, style="dim"), *map(Text, lines)])
        table.add_row(Text(path.stem, style="bold"), text)
        table.add_row()
    Console().print(table, highlight=False)


@app.command()
def version() -> None:
    """Print the version."""
    from kvlab import __version__

    typer.echo(__version__)


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="result.json files, or folders that hold some")],
    out: Annotated[Path, typer.Option(help="where tables and plots go")] = Path("report"),
    format: Annotated[str, typer.Option(help="any of md,csv,tex")] = "md,csv",
    plot: Annotated[str, typer.Option(help="any of pareto,ledger,heatmap")] = "pareto,ledger",
) -> None:
    """One table and one plot from many results."""
    from rich.console import Console

    from kvlab.report import combine, table

    results, _ = combine.load(paths)
    combined = combine.combine(results)
    files = combine.write(combined, out, _words(format), _words(plot))
    console = Console()
    console.print(table.text(combined.summary, console.width, combined.caption), end="", markup=False, highlight=False)
    for note in combined.warnings:
        typer.echo(f"note: {note}")
    typer.echo(f"wrote {', '.join(str(p) for p in files.values())}")


def _words(text: str) -> list[str]:
    return [w for w in text.split(",") if w]


@app.command()
def compare(a: Path, b: Path) -> None:
    """Paired comparison of two results: difference and interval per metric."""
    from kvlab.report import compare as comparing
    from kvlab.report import result

    one, two = (result.read(_file(p)) for p in (a, b))
    documents = [comparing.documents(r, _file(p).parent) for r, p in ((one, a), (two, b))]
    typer.echo(comparing.markdown(comparing.compare(one, two, *documents)))


@app.command()
def verify(path: Annotated[Path, typer.Argument(help="a result.json, or its folder")]) -> None:
    """Run a result again from its own config and compare. Exit code 4 when it does not reproduce."""
    import tempfile

    from kvlab.report import result, verify
    from kvlab.session import Session
    from kvlab.tasks.progress import Progress

    stored = result.read(_file(path))
    with Progress() as progress, tempfile.TemporaryDirectory() as folder:
        session = Session(progress, threads=stored["threads"])  # reductions change with the number of threads
        told = verify.verify(stored, lambda config: session.run({**config, "logger": {}}, Path(folder)))
    for note in told["notes"]:
        typer.echo(f"note: {note}")
    typer.echo(f"verified: {told['checked']} values reproduce ({len(told['skipped'])} timings not compared)")


def _file(path: Path) -> Path:
    return path / "result.json" if path.is_dir() else path
