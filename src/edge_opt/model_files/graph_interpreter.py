"""One reading of an ONNX graph: each node as torch would compute it, on tensors that have shapes and no values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edge_opt.errors import EdgeOptError, TraceFailed, first_line
from edge_opt.model_files import (
    onnx_arithmetic,
    onnx_movement,
    onnx_quantized,
    onnxruntime_operators,
    tflite_arithmetic,
    tflite_movement,
)
from edge_opt.model_files.execution_plan import BY_SHAPE, CONTROL, KNOWN_DOMAINS, RANDOM, ExecutionPlan, check_order
from edge_opt.model_files.file_graph import (
    MOST_KNOWN,
    MOST_NODES,
    AttributeReference,
    FileGraph,
    FileNode,
    Function,
    ModuleSpan,
    graphs_in,
    names_from_outside,
    names_read,
)
from edge_opt.model_files.node_call import (
    Handler,
    NodeCall,
    define,
    handler_of,
    has_exact_values,
    numbers,
    real_values,
    torch_dtype,
    unrecorded,
)
from edge_opt.records.costs import Shape
from edge_opt.trace.inputs import MOST_ELEMENTS
from edge_opt.trace.lifetimes import nbytes_of, shape_of
from edge_opt.trace.module_calls import ModuleStack
from edge_opt.trace.shapes import output_specs
from edge_opt.trace.tape import current_tape

# Importing them fills the table of operators.
_TABLES = (onnxruntime_operators, onnx_movement, onnx_arithmetic, onnx_quantized, tflite_movement, tflite_arithmetic)
_STEPS = frozenset((torch.int8, torch.uint8, torch.int16))
# Elements of constants beyond a handful that are worked out in all: what they hold decides no shape.
_FEW_ELEMENTS = 1_024
_MOST_FOLDED = 1 << 21
_INPUTS_OF_A_NODE = 8
# Iterations of a loop whose number is not known before it ends: about a second of work.
_MOST_ROUNDS = 2_048
_DEEPEST_CALL = 64


def recorded_operators() -> int:
    """Return how many operators the trace has so far; 0 where nothing is recorded."""
    tape = current_tape()
    return 0 if tape is None else len(tape.ops)


class Reading(NamedTuple):
    """Notes of one interpretation of a file."""

    # Which operators of the trace each node became, by the node's index: the first, and one past the last.
    spans: dict[int, tuple[int, int]]
    value_bytes: dict[str, int]  # by the value's name


class DeferredDequantize(NamedTuple):
    """Floats that a DequantizeLinear would make, not made yet; what they are made of is kept alive."""

    node: FileNode
    inputs: dict[str, Any]


class _ByRule(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shapes by our own rules where there is one.

    Some of torch's meta kernels are Python decompositions that import `torch._dynamo`, which takes seconds; a file
    without any other need for the compiler would pay for it. A new torch may change which: run
    tests/model_files with `python -X importtime` and look for `torch._dynamo`.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `Tape`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = output_specs(func, args, kwargs or {})
        if results is None or len(results) != 1:
            return func(*args, **(kwargs or {}))
        size, strides, dtype = results[0]
        return torch.empty_strided(size, strides, dtype=dtype, device="meta")


class GraphInterpreter:
    """One reading of the graph with inputs of one shape."""

    def __init__(self, plan: ExecutionPlan, inputs: dict[str, torch.Tensor]) -> None:
        self.plan = plan
        tape = current_tape()
        self.stack = ModuleStack({}) if tape is None else tape.stack
        self.reading = Reading({}, {})
        self.values: dict[str, Any] = {**plan.tensors, **inputs, "": None}
        self.constant_values: dict[str, torch.Tensor] = dict(plan.constant_values)
        self.bytes: dict[str, torch.Tensor] = {}  # what a DequantizeLinear was given, by the name of its result
        self.loop_values: frozenset[str] = frozenset()  # what a loop passes to its body, and what depends on it
        self.executed_nodes = 0
        self.depth = 0
        self.folded = 0
        # What graphs inside read from around them, and the values of their own constants, by their identity.
        self.outside: dict[int, tuple[list[str], dict[str, torch.Tensor | None]]] = {}
        self.dims = {
            dim: size
            for value in plan.file.graph.inputs
            for dim, size in zip(value.shape or (), inputs[value.name].shape, strict=False)
            if isinstance(dim, str) and dim
        }

    def whole(self) -> Any:
        """Read every node, and return what the file returns."""
        self._note(self.plan.names)
        self._read_span(self.plan.tree)
        results = tuple(self.value(value.name) for value in self.plan.file.graph.outputs)
        return results[0] if len(results) == 1 else results

    def _read_span(self, span: ModuleSpan) -> None:
        """Read the nodes of one call of a module; modules inside it are shown with the shapes that go in and out."""
        for item in span.items:
            if isinstance(item, int):
                self.node(item)
                continue
            sources, results = self.plan.boundary(item)
            path = item.scope.path
            with self.stack.scope(path, self.plan.modules[path], self._shapes(sources)) as frame:
                self._read_span(item)
                frame.outputs = self._shapes(results)

    def _shapes(self, names: Sequence[str]) -> tuple[Shape, ...]:
        values = (self.bytes.get(name, self.values.get(name)) for name in names)
        return tuple(shape_of(value) for value in values if isinstance(value, torch.Tensor))

    def _note(self, names: Sequence[str]) -> None:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, torch.Tensor):
                self.reading.value_bytes[name] = nbytes_of(value)

    def node(self, index: int) -> None:
        """Read one node, and note which operators of the trace it became."""
        before = recorded_operators()
        node = self.plan.nodes[index]
        self._count(node)
        if index in self.plan.folded:
            self._fold_constant(node)
        elif node.op == "DequantizeLinear":
            self.bytes[node.outputs[0]] = self.value(node.inputs[0])
            # Put off until somebody reads the floats: a runtime that computes on bytes never makes them.
            inputs = {name: self.values[name] for name in node.inputs if name}
            self.values[node.outputs[0]] = DeferredDequantize(node, inputs)
        else:
            self._step(node, index in self.plan.runs_quantized)
        self._note(node.outputs)
        for name in (*self.plan.reads[index], *node.outputs):
            is_over = self.plan.last.get(name) == index and name != ""  # the empty name means an omitted value
            if is_over and name not in self.plan.outputs and name not in self.plan.tensors:
                self.values.pop(name, None)
                self.bytes.pop(name, None)
        self.reading.spans[index] = (before, recorded_operators())

    def value(self, name: str, runs_quantized: bool = False) -> Any:
        """Return a value by its name; floats of quantized data are made when they are first read."""
        if runs_quantized and name in self.bytes:
            return self.bytes[name]
        if name not in self.values:
            index = self.plan.indices.get(name)
            maker = "a node" if index is None else self.plan.nodes[index].label
            raise TraceFailed(f"{maker}: its result {name!r} is not worked out here; leave that part out to profile")
        value = self.values[name]
        if isinstance(value, DeferredDequantize):
            node = value.node
            inputs = [value.inputs.get(input_name) for input_name in node.inputs]
            constants = [self.constant_values.get(input_name) for input_name in node.inputs]
            value = onnx_quantized.dequantize(NodeCall(node, node.attributes, inputs, constants, self.plan.file.opset))
            self.values[name] = value
        return value

    def _count(self, node: FileNode) -> None:
        """Count an executed node; one with a thousand inputs takes as long as many."""
        self.executed_nodes += 1 + len(node.inputs) // _INPUTS_OF_A_NODE
        if self.executed_nodes > MOST_NODES:
            raise TraceFailed(
                f"{node.label}: the file executes more than {MOST_NODES:,} nodes, each loop iteration and function "
                "call included; profile the body of its loop as a file of its own"
            )

    def _may_evaluate(self, *sides: Sequence[torch.Tensor | None]) -> bool:
        """Return whether a node with that many elements on a side is evaluated: few always, many until enough were."""
        count = max(sum(tensor.numel() for tensor in side if tensor is not None) for side in sides)
        if count <= _FEW_ELEMENTS:
            return True
        self.folded += count
        return self.folded <= _MOST_FOLDED

    def _fold_constant(self, node: FileNode) -> None:
        """Note the result of a node that is known before the run: its values where they are few, else its shape."""
        if node.op == "Constant" and self.plan.tensors.keys() & set(node.outputs):
            return  # a weight, which is there already
        with unrecorded():
            real = [self.constant_values.get(name) for name in node.inputs]
            is_known = all(value is not None or not name for value, name in zip(real, node.inputs, strict=True))
            is_known = is_known and has_exact_values(node) and node.op not in BY_SHAPE
            # Integers of a few bits are multiples of a scale there, which is not known here.
            is_steps = node.domain == "tflite" and any(value is not None and value.dtype in _STEPS for value in real)
            is_known = is_known and not is_steps
            # The shape comes first: a few values can ask for a result that no memory holds.
            with _ByRule():  # type: ignore[no-untyped-call]
                self._step(node, False)
            outputs = [self.values[name] for name in node.outputs if name]
            if node.op in BY_SHAPE:
                self.constant_values[node.outputs[0]] = outputs[0]
            is_known &= all(isinstance(value, torch.Tensor) and value.numel() <= MOST_KNOWN for value in outputs)
            results = self._evaluate(node, real) if is_known and self._may_evaluate(real, outputs) else None
            if results is not None:
                self.constant_values.update(zip(node.outputs, results, strict=False))
            for name in node.outputs:
                value = self.values.get(name)
                if isinstance(value, torch.Tensor) and not value.is_meta:
                    self.values[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")

    def _evaluate(self, node: FileNode, real: list[torch.Tensor | None]) -> tuple[Any, ...] | None:
        """Return the values of a node whose inputs are known; None where torch has no kernel for their element type."""
        handler = handler_of(node)
        assert handler is not None
        try:
            return self._called(NodeCall(node, node.attributes, real, real, self.plan.file.opset, "cpu"), handler)
        except TraceFailed as error:
            if isinstance(error.__cause__, NotImplementedError):
                return None
            raise

    def _step(self, node: FileNode, runs_quantized: bool) -> None:
        """Read one node; its results are noted under their names."""
        function = self.plan.file.functions.get((node.domain, node.op))
        inputs = [self.value(name, runs_quantized) for name in node.inputs]
        constants = [self.constant_values.get(name) for name in node.inputs]
        call = NodeCall(node, node.attributes, inputs, constants, self.plan.file.opset)
        handler = handler_of(node)
        if node.op in CONTROL and node.domain in KNOWN_DOMAINS:
            results = self._called(call, _Control(self, call).read)
        elif handler is not None:
            results = self._called(call, handler)
            _check_types(call, results)
        elif function is not None:
            results = self._function(function, call)
        else:
            results = self._opaque(call)
        for name, value in zip(node.outputs, results, strict=False):
            if name:
                self.values[name] = value

    @staticmethod
    def _called(call: NodeCall, handler: Handler) -> tuple[Any, ...]:
        try:
            results = handler(call)
        except EdgeOptError:
            raise
        except Exception as error:
            raise call.error(f"its inputs do not fit: {first_line(error)}") from error
        results = results if isinstance(results, tuple) else (results,)
        largest = max((value.numel() for value in results if isinstance(value, torch.Tensor)), default=0)
        if largest > MOST_ELEMENTS:
            raise call.error(f"its result would have {largest:,} elements; at most {MOST_ELEMENTS:,} are followed")
        return results

    def _function(self, function: Function, call: NodeCall) -> tuple[Any, ...]:
        """Read a function of the file node by node, with names of its own."""
        values = {**dict.fromkeys(function.inputs), **dict(zip(function.inputs, call.inputs, strict=False))}
        known = dict(zip(function.inputs, call.constant_values, strict=False))
        attributes = function.defaults | call.attributes
        with self.names(call, values, known):
            for node in function.nodes:
                settings = {
                    name: attributes.get(value.name) if isinstance(value, AttributeReference) else value
                    for name, value in node.attributes.items()
                }
                settings = {name: value for name, value in settings.items() if value is not None}
                self.inner(replace(node, attributes=settings))
            return tuple(self.value(name) for name in function.outputs)

    @contextmanager
    def names(self, call: NodeCall, values: dict[str, Any], known: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
        """Read inside a function or a body: other names have values there, and some of these are known."""
        outer = self.values, self.constant_values, self.loop_values
        self.depth += 1
        if self.depth > _DEEPEST_CALL:
            raise call.error("its functions or graphs call each other in a circle, or too deep")
        self.values = {"": None, **values}
        self.constant_values = {name: value for name, value in known.items() if value is not None}
        try:
            yield
        finally:
            self.values, self.constant_values, self.loop_values = outer
            self.depth -= 1

    def inner(self, node: FileNode) -> None:
        """Read a node inside a function or a body: constant where everything it reads is known."""
        self._count(node)
        names = names_read(node)
        is_known = node.op not in RANDOM | CONTROL and self.constant_values.keys() >= set(names)
        if node.op in BY_SHAPE:
            self._fold_constant(node)
        elif not is_known:
            self._step(node, False)
        elif self.loop_values.isdisjoint(names):
            self._fold_constant(node)
        else:
            # A runtime computes this in each iteration, so it is recorded although its values are known here.
            # Arithmetic on integers is left out: it is the counting of the loop itself.
            self.loop_values |= set(node.outputs)
            recorded: dict[str, Any] = {}
            if any(self.constant_values[name].is_floating_point() for name in names):
                self._step(node, False)
                recorded = {name: self.values[name] for name in node.outputs if name in self.values}
            self._fold_constant(node)
            self.values.update(recorded)

    def _opaque(self, call: NodeCall) -> tuple[Any, ...]:
        """Record an operator without a rule; the file must say the shapes that it returns."""
        outputs = sklearn_outputs(call)
        if outputs:
            return _unpriced(call, outputs[: len(call.node.outputs)])
        results = []
        for name in call.node.outputs:
            value = self.plan.file.graph.values.get(name)
            dims: list[Any] = [None]
            if value is not None and value.shape is not None:
                dims = [self.dims.get(dim) if isinstance(dim, str) else dim for dim in value.shape]
            if value is None or value.dtype is None or None in dims:
                raise call.error("there is no rule for it, and the file does not say the shape of its result; "
                                   "run onnx.shape_inference over the file, or leave that part out")  # fmt: skip
            results.append(call.empty(tuple(dims), torch_dtype(value.dtype)))
        return _unpriced(call, results)


def _check_types(call: NodeCall, results: tuple[Any, ...]) -> None:
    """Refuse results of other element types than the file says: their widths would be wrong figures."""
    for (_, dtype), value in zip(call.get("results", ()), results, strict=False):
        if isinstance(value, torch.Tensor) and dtype is not None and value.dtype != torch_dtype(dtype):
            shown = str(value.dtype).removeprefix("torch.")
            raise call.error(f"its result would be {shown}, but the file says {dtype}; there is no rule for it")


def sklearn_outputs(call: NodeCall) -> list[torch.Tensor]:
    """Return results of trees and support vectors, whose work depends on values: class and scores, or targets."""
    settings = call.attributes
    labels = (settings.get(f"classlabels_{kind}") for kind in ("int64s", "strings", "ints"))
    classes = next(filter(None, labels), ())
    if call.node.domain != "ai.onnx.ml" or not (classes or call.node.op.endswith("Regressor")):
        return []
    rows = call.tensor().shape[0]
    if classes:
        return [call.empty((rows,), torch.int64), call.empty((rows, len(classes)), torch.float32)]
    return [call.empty((rows, int(settings.get("n_targets", 1))), torch.float32)]


def _unpriced(call: NodeCall, outputs: list[torch.Tensor]) -> tuple[Any, ...]:
    """Record an operator without a rule under its name, and return its results."""
    name = re.sub(r"\W", "_", f"{call.node.domain}_{call.node.op}" if call.node.domain else call.node.op)
    if not hasattr(torch.ops.onnx_file, name):
        schema = f"{name}(Tensor[] inputs, Tensor[] like) -> Tensor[]"
        define(schema, lambda inputs, like: [torch.empty_like(tensor) for tensor in like])
    tensors = [value for value in call.inputs if isinstance(value, torch.Tensor)]
    return tuple(getattr(torch.ops.onnx_file, name)(tensors, outputs))


class _Control:
    """If, Loop and Scan: what they run is counted where the number of runs is known."""

    def __init__(self, run: GraphInterpreter, call: NodeCall) -> None:
        self.run = run
        self.call = call

    def read(self, call: NodeCall) -> Any:
        """Run the node.

        This is a method and not a closure: after an error, a frame of the traceback keeps a closure's variables alive,
        and to find and release the tensors behind them takes seconds.
        """
        return getattr(self, f"_{call.node.op.lower()}")()

    def _body(
        self, graph: FileGraph, inputs: list[Any], known: list[torch.Tensor | None], is_round: bool = False
    ) -> list[Any]:
        """Run a graph inside a node, or one iteration of a loop's; it sees the values around it."""
        run = self.run
        names = [value.name for value in graph.inputs]
        values = {name: run.plan.inner[id(constant)] for name, constant in graph.constants.items()}
        if id(graph) not in run.outside:
            known_values = {name: real_values(constant) for name, constant in graph.constants.items()}
            run.outside[id(graph)] = names_from_outside(graph), known_values
            check_order(graph.nodes, {*run.values, *values, *names})
        around, known_values = run.outside[id(graph)]
        values = {name: run.values[name] for name in around if name in run.values} | values
        constants = {name: run.constant_values.get(name) for name in around}
        constants |= known_values | dict(zip(names, known, strict=False))
        with run.names(self.call, values | dict(zip(names, inputs, strict=False)), constants):
            run.loop_values = run.loop_values.union(names) if is_round else run.loop_values
            for node in graph.nodes:
                run.inner(node)
            self.last_constants = [run.constant_values.get(value.name) for value in graph.outputs]
            return [run.value(value.name) for value in graph.outputs]

    def _check_iterations(self, count: int, body: FileGraph) -> None:
        """Refuse a loop whose number of iterations is too large before its first iteration."""
        nodes = self._executed(body)
        if count * nodes > MOST_NODES:
            raise self.call.error(
                f"it runs {count:,} iterations of {nodes:,} nodes, and at most {MOST_NODES:,} nodes are executed; "
                "profile its body as a file of its own"
            )

    def _executed(self, graph: FileGraph) -> int:
        """Return how many nodes one run of a graph executes; inner loops count as often as they are known to run."""
        nodes = len(graph.nodes)
        for node in graph.nodes:
            count = self.run.constant_values.get(node.inputs[0]) if node.op == "Loop" and node.inputs else None
            times = 1 if count is None else max(int(numbers(count)[0]), 0)
            nodes += times * sum(map(self._executed, graphs_in(node)))
        return nodes

    def _if(self) -> tuple[Any, ...]:
        condition = self.call.constant_values[0]
        if condition is None:
            raise self.call.error("which branch runs depends on values that are known only when the model runs")
        branch = self.call.get("then_branch" if numbers(condition)[0] else "else_branch")
        return tuple(self._body(branch, self.call.inputs[1:], self.call.constant_values[1:]))

    def _while(self) -> tuple[Any, ...]:
        call, body = self.call, self.call.get("body")
        state, known = list(call.inputs), list(call.constant_values)
        for _ in range(_MOST_ROUNDS):
            self._body(call.get("condition"), state, known)
            goes_on = self.last_constants[0] if self.last_constants else None
            if goes_on is None:
                raise call.error("how often it runs depends on values that are known only when the model runs")
            if not numbers(goes_on)[0]:
                return tuple(state)
            state, before = self._body(body, state, known, True), known
            known = list(self.last_constants)
            if all(value is not None for value in known) and [*map(numbers, known)] == [*map(numbers, before)]:
                raise call.error("it never ends: its values stay what they are")
        raise call.error(f"it runs more than {_MOST_ROUNDS:,} iterations; profile its body as a file of its own")

    def _call(self) -> tuple[Any, ...]:
        return tuple(self._body(self.call.get("body"), self.call.inputs, self.call.constant_values))

    _stablehlo_composite = _call

    def _call_once(self) -> tuple[Any, ...]:
        """Skip nodes that fill tables and variables before the first run."""
        return ()

    def _loop(self) -> tuple[Any, ...]:
        call, body = self.call, self.call.get("body")
        count = call.constant_values[0]
        goes_on = call.constant_values[1] if len(call.constant_values) > 1 else None
        if count is None or (call.has(1) and goes_on is None):
            raise call.error("how often it runs depends on values that are known only when the model runs")
        trips = int(numbers(count)[0]) if goes_on is None or numbers(goes_on)[0] else 0
        state, known = list(call.inputs[2:]), list(call.constant_values[2:])
        scans: list[list[Any]] = [[] for _ in range(len(body.outputs) - 1 - len(state))]
        self._check_iterations(trips, body)
        for number in range(trips):
            with unrecorded():
                counters = [torch.tensor(number), torch.tensor(True)]
                shown = [value.to("meta") for value in counters]
            outputs = self._body(body, [*shown, *state], [*counters, *known], True)
            again = self.last_constants[0]
            if again is None and body.outputs[0].name != body.inputs[1].name:
                raise call.error("when it ends depends on values that are known only when the model runs")
            state, known = outputs[1 : 1 + len(state)], list(self.last_constants[1 : 1 + len(state)])
            for index, value in enumerate(outputs[1 + len(state) :]):
                scans[index].append(value)
            if again is not None and not numbers(again)[0]:
                break
        if not trips and scans:
            raise call.error("it never runs, and what it would have collected has no shape")
        return (*state, *(torch.stack(values) for values in scans))

    def _scan(self) -> tuple[Any, ...]:
        call, body = self.call, self.call.get("body")
        inputs = min(int(call.get("num_scan_inputs", 1)), len(call.inputs))
        state = list(call.inputs[: len(call.inputs) - inputs])
        rows = call.inputs[len(state) :]
        axes = list(call.get("scan_input_axes", ())) or [0] * inputs
        scans: list[list[Any]] = [[] for _ in range(len(body.outputs) - len(state))]
        count = rows[0].shape[axes[0]]
        self._check_iterations(count, body)
        for number in range(count):
            step = [row.select(axis, number) for row, axis in zip(rows, axes, strict=True)]
            outputs = self._body(body, [*state, *step], [None] * (len(state) + inputs))
            state = outputs[: len(state)]
            for index, value in enumerate(outputs[len(state) :]):
                scans[index].append(value)
        output_axes = list(call.get("scan_output_axes", ())) or [0] * len(scans)
        return (*state, *(torch.stack(values, axis) for values, axis in zip(scans, output_axes, strict=True)))
