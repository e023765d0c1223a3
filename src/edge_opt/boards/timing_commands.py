"""Commands that time an ONNX file on a board, one line for each runtime, and the figure to type in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath


@dataclass(frozen=True, slots=True)
class TimingCommand:
    """One way to time a file.

    Attributes:
        runtime: What runs the model, as `edge-opt board --runtime` takes it.
        line: What to type on the board; with `edge-opt`, on the workstation.
        figure: Which figure of its output is the time, and its unit.
    """

    runtime: str
    line: str
    figure: str


def timing_commands(
    file: str, shape: tuple[int, ...] = (1, 3, 224, 224), threads: int = 4
) -> tuple[TimingCommand, ...]:
    """How to time an ONNX file with ncnn, TFLite, ONNX Runtime and edge-opt.

    Args:
        file: The ONNX file, of one input.
        shape: Of its input, the batch first and the channels second.
        threads: To time it with.

    >>> timing_commands("resnet18.onnx", threads=1)[2].line
    'onnxruntime_perf_test -I -e cpu -x 1 -y 1 -r 50 resnet18.onnx'
    """
    stem, name = PurePath(file).stem, PurePath(file).name
    sides = ",".join(map(str, shape))
    # ncnn's tools count from the innermost dimension, without the batch.
    inner = ",".join(map(str, reversed(shape[1:])))
    # pnnx writes NAME.ncnn.param, with signs that are none of C's names as underscores.
    plain = "".join(sign if sign.isalnum() else "_" for sign in stem)
    return (
        TimingCommand(
            "ncnn",
            f"pnnx {name} inputshape=[{sides}] && "
            f"benchncnn 20 {threads} 0 -1 1 param={plain}.ncnn.param shape=[{inner}]",
            "avg, in ms",
        ),
        TimingCommand(
            "tflite",
            f"onnx2tf -b 1 -i {name} -o {stem}_tf && benchmark_model --graph={stem}_tf/{stem}_float32.tflite "
            f"--num_threads={threads} --num_runs=50",
            "Inference (avg), in µs: divide by 1000",
        ),
        TimingCommand(
            "onnxruntime",
            f"onnxruntime_perf_test -I -e cpu -x {threads} -y 1 -r 50 {name}",
            "Average inference time cost, in ms",
        ),
        TimingCommand(
            "onnxruntime",
            f"edge-opt measure-on tls://HOST:8786 {name} --tls-dir tls --threads {threads}",
            "the median that it prints; the board runs `edge-opt worker`",
        ),
    )
