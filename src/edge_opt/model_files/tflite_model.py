"""A `.tflite` file as a model: read, never run; LiteRT runs it where it is measured."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from edge_opt import units
from edge_opt.errors import InvalidInput
from edge_opt.model_files.file_model import FileModel
from edge_opt.model_files.tflite_arena import Arena, plan_arena
from edge_opt.model_files.tflite_file import read_tflite


class TfliteModel(FileModel):
    """A model read from a `.tflite` file."""

    def session(self, threads: int | None = None) -> nn.Module:
        """The file as LiteRT's interpreter runs it, to be measured.

        Args:
            threads: Threads of the interpreter; as many as torch uses unless given.
        """
        from edge_opt.model_files.tflite_session import TfliteSession

        return TfliteSession(self.file, self.plan.arguments, threads)

    def arena(self) -> Arena:
        """Where the interpreter's planner places the tensors of the run that was profiled last, without a delegate."""
        plan = self.plan
        if not plan.made_bytes:
            raise InvalidInput("the file was not profiled yet, so its shapes are not known; profile it first")
        run = [node for place, node in enumerate(plan.nodes) if place not in plan.folded]
        kept = {node.outputs[0] for place, node in enumerate(plan.nodes)
                if place in plan.folded and node.op == "DEQUANTIZE"}  # fmt: skip
        made = {*plan.names, *(name for node in run for name in node.outputs)}
        ordered = [name for name in plan.file.graph.values if name in plan.made_bytes]
        outputs = [value.name for value in plan.file.graph.outputs]
        return plan_arena(
            run, plan.names, outputs, {name: plan.made_bytes[name] for name in ordered if name in made},
            {name: plan.made_bytes[name] for name in ordered if name in kept},
        )  # fmt: skip

    def trace_notes(self) -> tuple[str, ...]:
        """What a reader of a profile should know beside its figures: the arena."""
        found = self.arena()
        kept = f", and {units.size(found.persistent_bytes)} for weights widened once" if found.persistent_bytes else ""
        return (f"TFLite's planner places the tensors in an arena of {units.size(found.nbytes)}{kept}, without a "
                "delegate; scratch of kernels comes on top",)  # fmt: skip


def load_tflite(path: str | Path) -> TfliteModel:
    """The model of a `.tflite` file, to be profiled, compared and checked like any other; nothing in it is run.

    Args:
        path: The file.
    """
    return TfliteModel(read_tflite(path))
