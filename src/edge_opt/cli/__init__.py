"""The command line: each command parses, calls one public function, saves, and says where.

One file per group of commands, registered here.
"""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer
    from typer import Option

    from edge_opt.cli.device_commands import board, calibrate, devices, doctor, measure_on, targets
    from edge_opt.cli.explain_commands import explain, reconcile
    from edge_opt.cli.mcp_command import mcp
    from edge_opt.cli.profile_commands import llm, profile, train_cost
    from edge_opt.cli.run_commands import SeveralSeeds, SweepCommand, init, report, run, status, sweep
    from edge_opt.cli.shell import Command, Debug, Json, Shell, Trust, run_to_the_end
    from edge_opt.cli.variant_commands import check, compare, convert, prune
except KeyboardInterrupt:  # while the program is still being read
    sys.stderr.write("interrupted; nothing was begun\n")
    raise SystemExit(130) from None

app = typer.Typer(
    cls=Shell,
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
        bool, Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    json: Json = False,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Show what a model costs on limited hardware, and find the variant that fits.

    \b
    edge-opt profile torchvision:resnet50 -i 1x3x224x224
    edge-opt profile net.py:Net -i 1x3x32x32 --target raspberry-pi-4 --target jetson-nano
    edge-opt check net.py:Net -i 1x3x32x32 --budget "macs <= 600M"
    edge-opt init run.yaml && edge-opt run run.yaml

    `edge-opt COMMAND -h` shows more. Exit code 0: done; 1: a condition does not hold; 2: wrong use.
    """


_COMMANDS = (
    (run, "Train, sweep and export the best variant; resumes."),
    (init, "Write a commented configuration for a run."),
    (sweep, "Try pruning, precisions and runtimes on a trained model."),
    (status, "Show how far a sweep is, and the best candidate so far."),
    (report, "Write one HTML page of a run or a profile."),
    (profile, "Show what each layer costs, from shapes alone."),
    (train_cost, "Show what a training step costs, and its memory."),
    (llm, "Predict memory and tokens per second of a language model."),
    (compare, "Show what differs between models, layer by layer."),
    (explain, "Show why one model is faster than another or is not."),
    (reconcile, "Show why another tool counts differently."),
    (check, "Check budgets; the exit code says whether they hold."),
    (convert, "Write a model for a runtime and precision, and verify it."),
    (prune, "Remove channels and heads, and verify the result."),
    (targets, "Rank all known platforms for a model."),
    (devices, "List devices, every figure with its source."),
    (board, "Fit a board of your own to a few measured times."),
    (calibrate, "Measure this machine, to predict any model on it."),
    (measure_on, "Time an ONNX or TFLite file on a board."),
    (mcp, "Serve commands that only read as tools for coding agents."),
    (doctor, "Describe this machine, its meters and its noise."),
)
_CLASSES = {run: SeveralSeeds, sweep: SweepCommand}
for _function, _summary in _COMMANDS:
    _name = _function.__name__.replace("_", "-")
    app.command(_name, short_help=_summary, cls=_CLASSES.get(_function, Command))(_function)


def main() -> None:
    """Run the command line."""
    run_to_the_end(lambda: app(prog_name="edge-opt"))
