"""The command line: each command parses, calls one public function, saves, and says where.

One file per command, registered here.
"""

from __future__ import annotations

from typing import Annotated

import typer

from edge_opt.cli.check import check
from edge_opt.cli.compare import compare
from edge_opt.cli.devices import devices
from edge_opt.cli.doctor import doctor
from edge_opt.cli.export import export
from edge_opt.cli.init import init
from edge_opt.cli.profile import profile
from edge_opt.cli.prune import prune
from edge_opt.cli.quantize import quantize
from edge_opt.cli.report import report
from edge_opt.cli.run import SeveralSeeds, run
from edge_opt.cli.shell import Debug, Shell
from edge_opt.cli.status import status
from edge_opt.cli.sweep import sweep

app = typer.Typer(
    cls=Shell,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from edge_opt import __version__

        typer.echo(f"edge-opt {__version__}")
        raise typer.Exit()


@app.callback()
def edge_opt(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Debug = False,
) -> None:
    """What a PyTorch model costs on limited hardware, layer by layer.

    \b
    edge-opt profile torchvision:resnet50 --input 1x3x224x224
    edge-opt profile net.py:Net --input 8x3x32x32 --measure
    edge-opt check profile.json --budget "macs <= 600M"
    edge-opt run configs/default.yaml

    Results go to stdout, talk to stderr. Exit code 0: done; 1: a condition does not hold; 2: wrong use.
    """


app.command("profile")(profile)
app.command("doctor")(doctor)
app.command("devices")(devices)
app.command("init")(init)
app.command("run", cls=SeveralSeeds)(run)
app.command("sweep")(sweep)
app.command("report")(report)
app.command("status")(status)
app.command("compare")(compare)
app.command("check")(check)
app.command("prune")(prune)
app.command("quantize")(quantize)
app.command("export")(export)


def main() -> None:
    """Run the command line."""
    app(prog_name="edge-opt")
