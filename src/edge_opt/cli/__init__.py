"""The command line: each command parses, calls one public function, saves, and says where.

One file per group of commands, registered here.
"""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer
    from typer import Option

    from edge_opt.cli.compare_commands import check, compare
    from edge_opt.cli.compress_commands import export, prune, quantize
    from edge_opt.cli.device_commands import board, calibrate, devices, doctor, measure_on
    from edge_opt.cli.profile_commands import llm, profile, train_cost
    from edge_opt.cli.run_commands import SeveralSeeds, init, report, run, status, sweep
    from edge_opt.cli.shell import Shell, run_to_the_end
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
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error; every command takes it.")] = False,
) -> None:
    """Show what a PyTorch model costs on limited hardware, and find the variant that fits.

    \b
    edge-opt profile torchvision:resnet50 -i 1x3x224x224
    edge-opt profile net.py:Net -i 1x3x32x32 --target raspberry-pi-4 --target jetson-nano
    edge-opt llm hf:Qwen/Qwen3-4B --target raspberry-pi-5 --weights q4_k_m
    edge-opt check net.py:Net -i 1x3x32x32 --budget "macs <= 600M"
    edge-opt prune net.py:Net -i 1x3x32x32 --macs-target 0.5 -o pruned/
    edge-opt init run.yaml && edge-opt run run.yaml

    `edge-opt COMMAND -h` shows more. Exit code 0: done; 1: a condition does not hold; 2: wrong use.
    """


app.command("run", short_help="Train, sweep and export the best variant; resumes.", cls=SeveralSeeds)(run)
app.command("init", short_help="Write a commented configuration for a run.")(init)
app.command("sweep", short_help="Try pruning, precisions and runtimes on a trained model.")(sweep)
app.command("status", short_help="Show how far a sweep is, and the best so far.")(status)
app.command("report", short_help="Write one HTML page of a run or a profile.")(report)
app.command("profile", short_help="Show what each layer costs, from shapes alone.")(profile)
app.command("train-cost", short_help="Show what a training step costs, and its memory.")(train_cost)
app.command("llm", short_help="Predict memory and tokens per second of a language model.")(llm)
app.command("compare", short_help="Show what differs between models, layer by layer.")(compare)
app.command("check", short_help="Check budgets; the exit code says whether they hold.")(check)
app.command("devices", short_help="List devices, every figure with its source.")(devices)
app.command("board", short_help="Fit a board of your own to a few measured times.")(board)
app.command("calibrate", short_help="Measure this machine, to predict any model on it.")(calibrate)
app.command("measure-on", short_help="Time an ONNX file on a board.")(measure_on)
app.command("prune", short_help="Remove channels and heads, and prove the result.")(prune)
app.command("quantize", short_help="Convert to int8, and show what really runs in it.")(quantize)
app.command("export", short_help="Write a file for a runtime, and compare its outputs.")(export)
app.command("doctor", short_help="Describe this machine, its meters and its noise.")(doctor)


def main() -> None:
    """Run the command line."""
    run_to_the_end(lambda: app(prog_name="edge-opt"))
