"""Work that forward puts off or hands to others is counted, or the totals are a lower bound."""

from __future__ import annotations

import _thread
import ctypes
import math
import multiprocessing.pool
import os
import queue
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import onnxruntime
import pytest
import scipy.linalg
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import edge_opt as eo
import rasp
from edge_opt.errors import EdgeOptError, TraceFailed
from needed import needed
from zoo import torchvision_models

ONE = 2 * 8 * 8  # MACs of Linear(8, 8) on two rows


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(3):
            x = self.linear(x)
            yield x


def test_a_generator_is_counted_to_its_end() -> None:
    profile = eo.profile(Generator(), (2, 8))
    assert profile.totals.macs == 3 * ONE


def test_a_generator_inside_a_model_keeps_its_own_row() -> None:
    class Consumer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = Generator()

        def forward(self, x):
            return sum(self.steps(x))

    profile = eo.profile(Consumer(), (2, 8))
    assert profile.totals.macs == 3 * ONE
    assert all(call.path == "steps.linear" for call in profile.trace.modules if call.kind == "Linear")


def test_a_lazy_map_is_counted() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return {"outputs": map(self.linear, [x, x])}

    assert eo.profile(Lazy(), (2, 8)).totals.macs == 2 * ONE


def test_an_asynchronous_forward_is_refused() -> None:
    class Later(nn.Linear):
        async def forward(self, x):
            return super().forward(x)

    with pytest.raises(TraceFailed, match="async def"):
        eo.profile(Later(8, 8), (2, 8))


class Handing(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return getattr(self, self.way)(x)

    def pool(self, x):
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(self.linear, [x, x]))

    def thread(self, x):
        results = []
        worker = threading.Thread(target=lambda: results.append(self.linear(x)))
        worker.start()
        worker.join()
        return results[0]

    def added_thread(self, x):
        results = []
        worker = threading.Thread(target=lambda: results.append(torch.ones_like(x) @ torch.ones(8, 8, device=x.device)))
        worker.start()
        worker.join()
        return self.linear(x) + results[0]

    def thread_pool(self, x):
        with multiprocessing.pool.ThreadPool(1) as pool:
            return pool.apply(torch.relu, (x,))

    def idle_thread(self, x):
        worker = threading.Thread(target=lambda: None)
        worker.start()
        worker.join()
        return self.linear(x)


def outside(profile: eo.Profile) -> list[tuple[str, str]]:
    """Where work was computed that no operator did, and the module that met its result."""
    return [(item.op, item.module) for item in profile.unpriced if item.op.startswith("outside")]


@pytest.mark.parametrize("way", ["pool", "thread", "thread_pool"])
def test_work_in_another_thread_makes_the_totals_a_lower_bound(way: str) -> None:
    profile = eo.profile(Handing(way), (2, 8))
    assert profile.totals.is_lower_bound and outside(profile)


def test_a_thread_that_computes_nothing_does_not_matter() -> None:
    profile = eo.profile(Handing("idle_thread"), (2, 8))
    assert profile.totals.macs == ONE and not profile.totals.is_lower_bound


def test_a_worker_that_waited_before_is_noticed() -> None:
    todo: queue.Queue = queue.Queue()
    done: queue.Queue = queue.Queue()

    def work() -> None:
        while (x := todo.get()) is not None:
            done.put(x * 2)

    class Queued(nn.Module):
        def forward(self, x):
            todo.put(x)
            return done.get() + 1

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    # The worker still has its input in a variable, and nobody can take it from there.
    with pytest.raises(TraceFailed, match="keeps a result"):
        eo.profile(nn.Sequential(nn.Linear(8, 8), Queued()), (2, 8))
    todo.put(None)


LEFT, RIGHT = numpy.random.default_rng(1).random((2, 8, 8), dtype=numpy.float32)


class Elsewhere(nn.Module):
    """Computes its result without torch's operators, in one of many ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(8, 8)
        self.register_buffer("constant", torch.zeros(8))
        self.array = LEFT + 1

    def forward(self, x):
        return getattr(self, self.way)(self.linear(x))

    def numpy(self, y):
        return torch.from_numpy(numpy.tanh(y.numpy())) + 1

    def numpy_copied(self, y):
        return torch.tensor(numpy.asarray(y) @ numpy.ones((8, 8), dtype=numpy.float32)) + 1

    def numpy_returned(self, y):
        return numpy.tanh(y.numpy())

    def list_loop(self, y):
        return torch.tensor([[value * 2 for value in row] for row in y.tolist()]) + 1

    def item_loop(self, y):
        return torch.tensor([float(value) ** 2 for row in y for value in row] * 2) + 1

    def buffer(self, y):
        return torch.frombuffer(bytearray(bytes(y.numpy())), dtype=torch.float32) + 1

    def c_library(self, y):
        out = torch.empty(2, 8)
        ctypes.memmove(out.data_ptr(), y.contiguous().numpy().ctypes.data, 64)
        return torch.tensor(out.numpy()) + 1

    def forked(self, y):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"1" * 8)
            os._exit(0)
        os.waitpid(child, 0)
        return y + torch.tensor([float(chr(value)) for value in os.read(read, 8)])

    def later(self, y):
        return lambda: self.linear(y)

    def later_in_an_object(self, y):
        return SimpleNamespace(y=y, run=lambda: self.linear(y))

    def numpy_number(self, y):
        return y * float(numpy.linalg.norm(y.numpy()))

    def numpy_aside(self, y):
        self.values = numpy.linalg.svd(y.numpy())[1]
        return y

    def item_sum(self, y):
        return y + sum(math.sin(value.item()) for value in y.flatten())

    def list_sum(self, y):
        return y + sum(map(math.sin, y.flatten().tolist()))

    def apply(self, y):
        return y.apply_(math.sin)

    def map(self, y):
        return y.clone().map_(y, lambda a, b: a * b)

    def address(self, y):
        out = torch.empty(2, 8)
        ctypes.memmove(out.data_ptr(), y.data_ptr() if y.sum() < 1e9 else 0, 64)
        return out

    def forked_number(self, y):
        child = os.fork()
        if child == 0:
            os._exit(3)
        return y * os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def new_thread_number(self, y):
        results = queue.Queue()
        _thread.start_new_thread(lambda: results.put((y @ y.T).sum()), ())
        return y * results.get()

    def without_modes(self, y):
        with _disable_current_modes():
            z = y @ y.T
        return z + 1

    def without_modes_in_place(self, y):
        with _disable_current_modes():
            y.addmm_(y, torch.ones(8, 8, device=y.device))
        return y + 1

    def thread_in_place(self, y):
        worker = threading.Thread(target=lambda: y.addmm_(y, torch.ones(8, 8, device=y.device)))
        worker.start()
        worker.join()
        return y + 1

    def thread_into_another(self, y):
        out = torch.zeros_like(y)
        POOL.submit(torch.add, y, y, out=out).result()
        return out

    def thread_into_a_constant(self, y):
        POOL.submit(self.constant.add_, 1).result()
        return y + self.constant

    def new_thread_of_a_module(self, y):
        results = queue.Queue()
        _thread.start_new_thread(lambda: results.put(self.linear(y)), ())
        return results.get(timeout=60)

    def subprocess(self, y):
        return y * int(subprocess.run(["expr", "1", "+", "2"], capture_output=True).stdout)

    def shell(self, y):
        return y * (1 + os.system("true"))

    def few_items(self, y):
        return y * sum(math.sin(value.item()) for value in y[0, :2])

    def few_values_in_a_list(self, y):
        return y * sum(value * 2 for value in y[0, :2].tolist())

    def few_values_in_numpy(self, y):
        return y * float(y[0, :2].numpy().sum())

    def address_only(self, y):
        return y * ctypes.c_float.from_address(y.data_ptr()).value

    def one_float(self, y):
        return y * math.sin(y.mean().item())

    def integers_in_a_list(self, y):
        return y * sum(7 * index + 5 for index in y.argmax(-1).tolist())

    def integers_one_by_one(self, y):
        return y + sum(3 * int(index) for index in y.argmax(-1))

    def weights_in_numpy(self, y):
        return y * torch.from_numpy(numpy.linalg.svd(self.linear.weight.detach().numpy())[1])

    def weights_to_one_number(self, y):
        return y / float(numpy.linalg.norm(self.linear.weight.detach().numpy()))

    def weights_in_a_list(self, y):
        return y + torch.tensor([math.tanh(value) for value in self.linear.weight[0:2].flatten().tolist()][:8])

    def buffer_in_numpy(self, y):
        return y * torch.from_numpy(numpy.tanh(self.constant.repeat(2).numpy()))[:8]

    def weights_in_place_in_numpy(self, y):
        weights = self.linear.weight.detach().numpy()
        weights *= 1.5
        return y

    def a_count_that_is_returned(self, y):
        return y, sum(7 * index + 5 for index in y.argmax(-1).tolist())

    def later_in_a_method(self, y):
        class Result:
            run = lambda result: self.linear(result.y)  # noqa: E731

        result = Result()
        result.y = y
        return result

    def session_of_constants(self, y):
        return y + torch.from_numpy(SESSION.run(None, {"x": numpy.ones(8, numpy.float32)})[0])

    def constants_in_numpy(self, y):
        return y * torch.from_numpy(LEFT @ RIGHT)[0]

    def constants_copied_from_numpy(self, y):
        return y * torch.tensor(LEFT @ RIGHT, device=y.device)[0]

    def constants_in_a_buffer(self, y):
        return y * torch.frombuffer(bytearray((LEFT @ RIGHT).tobytes()), dtype=torch.float32)[:8]

    def constants_in_scipy(self, y):
        return y * torch.from_numpy(scipy.linalg.expm(LEFT))[0]

    def constants_to_a_row(self, y):
        return y * torch.from_numpy(LEFT[0] @ RIGHT)

    def constants_to_one_number(self, y):
        return y * float(numpy.linalg.norm(LEFT))

    def an_array_of_the_module(self, y):
        return y * float(self.array.sum())

    def an_array_of_the_module_in_place(self, y):
        self.array *= 1.5
        return y * torch.from_numpy(self.array[0])

    def positions_in_numpy(self, y):
        return y * torch.from_numpy(numpy.sin(numpy.arange(16.0)).reshape(2, 8))

    def positions_in_python(self, y):
        return y * torch.tensor([math.sin(position) for position in range(16)]).view(2, 8)

    def numbers_drawn_in_numpy(self, y):
        return y * torch.from_numpy(numpy.random.default_rng(0).random((8, 8)))[0]

    def later_in_an_object_of_ones_own(self, y):
        result = Later()
        result.run = lambda: self.linear(y)
        return result


class Later:
    pass


POOL = ThreadPoolExecutor(1)


def _session() -> onnxruntime.InferenceSession:
    value = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=[8])
    graph = helper.make_graph([helper.make_node("Exp", ["x"], ["y"])], "g", [value("x")], [value("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnxruntime.InferenceSession(model.SerializeToString())


SESSION = _session()

WAYS = [name for name, value in vars(Elsewhere).items() if callable(value) and name not in ("__init__", "forward")]


@pytest.mark.parametrize("way", WAYS)
def test_work_outside_torch_makes_the_totals_a_lower_bound(way: str) -> None:
    profile = eo.profile(nn.Sequential(Elsewhere(way)), (2, 8))
    assert profile.totals.macs == ONE
    assert profile.totals.is_lower_bound and outside(profile)


def test_numpy_does_not_get_at_the_weights_of_the_model() -> None:
    model = Elsewhere("weights_in_place_in_numpy")
    before = model.linear.weight.detach().clone()
    eo.profile(model, (2, 8))
    assert torch.equal(model.linear.weight, before)


def test_arithmetic_with_integers_of_an_input_makes_the_totals_a_lower_bound() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 8)

        def forward(self, ids):
            return self.table(ids) * sum(7 * number + 60 for number in ids[0].tolist())

    profile = eo.profile(Weighted(), torch.randint(0, 50, (2, 6)))
    assert outside(profile) == [("outside torch (python)", "")] and not profile.trace.used_real_tensors


def test_arrays_are_what_they_were_before() -> None:
    model, left = Elsewhere("an_array_of_the_module_in_place"), LEFT.copy()
    eo.profile(model, (2, 8))
    assert numpy.array_equal(LEFT, left) and numpy.array_equal(model.array, left + 1)


TABLE = numpy.arange(8, dtype=numpy.float32)


class Constants(nn.Module):
    """Makes tensors in forward from what was there before; nothing is computed elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.plain = torch.ones(8)
        self.masks = {"all": torch.ones(8)}

    def forward(self, x):
        y = self.linear(x) + self.plain + self.masks["all"] + MASK + MASK.data + self.linear.weight.data[0]
        y = y + torch.from_numpy(TABLE).to(y.device) + torch.tensor([1.0] * 8, device=y.device)
        y = y + torch.tensor([[1.0] * 8] * 2, device=y.device)  # a matrix that Python wrote down
        return y + torch.as_tensor([2.0] * 8, device=y.device) + torch.Tensor([1.0]).to(y.device)


MASK = torch.ones(8)


def test_constants_are_not_taken_for_work_elsewhere() -> None:
    profile = eo.profile(Constants(), (2, 8))
    assert not profile.totals.is_lower_bound and not outside(profile)


def test_a_busy_thread_of_somebody_else_does_not_turn_constants_into_work_elsewhere() -> None:
    is_over = threading.Event()
    other = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(is_over.is_set, True)])
    other.start()
    try:
        profiles = [eo.profile(Constants(), (2, 8)) for _ in range(5)]
    finally:
        is_over.set()
        other.join()
    assert [outside(profile) for profile in profiles] == [[]] * 5


class ReadsNumbers(nn.Module):
    """Reads values and computes nothing with them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("scale", torch.tensor(0.3))
        self.register_buffer("order", torch.arange(16))
        self.array = LEFT.astype(numpy.float64) * 2
        self.scales = [2 * scale for scale in SCALES]

    def forward(self, x):
        return getattr(self, self.way)(x)

    def scale_of_a_quantized_layer(self, x):
        return (x / self.scale.item()).round() * self.scale.item()

    def limit(self, x):
        return x / max(x.abs().max().item(), 1e-3)

    def early_exit(self, x):
        # Far from what the mean can be: a decision at its very threshold looks like a computed number.
        return x * 2 if x.mean().item() > 100 else x * 0.5

    def lengths(self, x):
        longest = int((x > 0).sum(-1).max())
        return x[:, :longest] + torch.arange(longest)

    def permutation(self, x):
        return x[:, torch.tensor(self.order.tolist()[7::-1])]

    def permutation_in_numpy(self, x):
        return x[:, torch.from_numpy(numpy.argsort(self.order.numpy()[:8]))]

    def sizes(self, x):
        return torch.split(x, torch.tensor([3, 5]).tolist(), 1)[0] * torch.linspace(0, 1, 12).tolist()[3]

    def an_array_as_it_is(self, x):
        return x @ torch.from_numpy(LEFT) @ torch.tensor(LEFT[::-1].copy(), device=x.device) * float(LEFT.max())

    def an_array_of_the_module_as_it_is(self, x):
        return x @ torch.from_numpy(self.array.astype(numpy.float32))

    def an_array_of_a_closure(self, x):
        return closure_of(RIGHT.astype(numpy.float64))(x)

    def literals(self, x):
        weights = [0.1, 0.3, 0.7, 1.1, 0.2, 0.4, 2.5, 0.6, 9.5, 3.25, 1.75, 0.05]
        return x * torch.tensor(weights)[:8] + torch.from_numpy(numpy.array(weights))[:8]

    def lists(self, x):
        return x * torch.from_numpy(numpy.array(SCALES))[:8] + torch.tensor(self.scales)[:8]

    def positions(self, x):
        grid = numpy.stack(numpy.meshgrid(numpy.linspace(0, 1, 20), numpy.arange(9.0)))
        mask = numpy.triu(numpy.full((16, 16), -numpy.inf), 1)
        return x + torch.from_numpy(grid).sum() + torch.from_numpy(mask)[0, 0] + torch.from_numpy(numpy.eye(16))[0, 0]


def closure_of(array):
    return lambda x: x @ torch.from_numpy(array)


SCALES = [0.13, 0.31, 0.72, 1.14, 0.25, 0.46, 2.57, 0.68, 9.59, 3.2, 1.71, 0.02]

PASSED_ON = [
    name for name, value in vars(ReadsNumbers).items() if callable(value) and name not in ("__init__", "forward")
]


@pytest.mark.parametrize("way", PASSED_ON)
def test_numbers_that_are_passed_on_are_no_work_elsewhere(way: str) -> None:
    profile = eo.profile(ReadsNumbers(way), torch.rand(2, 8))
    assert not profile.totals.is_lower_bound and not outside(profile)


@dataclass
class Batch:
    image: torch.Tensor
    extra: list


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.layers = [{"key": tensor}]


class Reads(nn.Module):
    def forward(self, x, given):
        tensor = given.image if isinstance(given, Batch) else given.layers[0]["key"]
        tensor += 1
        return x + tensor.sum()


@pytest.mark.parametrize("make", [lambda t: Batch(t, [t.clone()]), Holder], ids=["dataclass", "object"])
def test_tensors_inside_objects_are_inputs(make) -> None:
    inside = torch.zeros(4, 16)
    given = make(inside)
    profile = eo.profile(Reads(), [torch.zeros(2), given])
    count = 2 if isinstance(given, Batch) else 1
    assert profile.totals.input_bytes == 4 * (2 + count * 64)
    assert not inside.any()
    assert sum(storage.nbytes for storage in profile.trace.storages if storage.role == "input") == 4 * (2 + count * 64)


def test_the_tensors_of_a_hugging_face_cache_are_inputs() -> None:
    torchvision_models()  # transformers imports it
    transformers = needed("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    cache = transformers.DynamicCache()
    for layer in range(2):
        cache.update(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), layer)
    profile = eo.profile(model, kwargs={"input_ids": torch.zeros(1, 1, dtype=torch.int64), "past_key_values": cache})
    # Keys and values of 2 layers x 2 heads x 5 positions x 8, in float32; and one token of 8 bytes.
    assert profile.totals.input_bytes == 2 * 2 * 2 * 5 * 8 * 4 + 8
    assert cache.get_seq_length() == 5
    static = transformers.StaticCache(config=config, max_cache_len=64)
    static.early_initialization(1, 2, 8, torch.float32, "cpu")
    sizes = sum(layer.keys.nbytes + layer.values.nbytes for layer in static.layers)
    profile = eo.profile(model, kwargs={"input_ids": torch.zeros(1, 1, dtype=torch.int64), "past_key_values": static})
    assert profile.totals.input_bytes >= sizes == 2 * 2 * 2 * 64 * 8 * 4
    assert not any(layer.keys.is_meta or layer.keys.any() for layer in static.layers)


def test_a_number_made_in_forward_is_not_taken_for_the_work_of_a_busy_thread() -> None:
    class Scaled(nn.Module):
        def forward(self, x):
            return x * torch.tensor(0.5, device=x.device)

    is_done = threading.Event()
    worker = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(is_done.is_set, True)])
    worker.start()
    profile = eo.profile(Scaled(), (2, 8))
    is_done.set()
    worker.join()
    assert not profile.totals.is_lower_bound


class InNumpy(nn.Linear):
    def forward(self, x):
        return torch.from_numpy(super().forward(x).detach().numpy() @ numpy.ones((8, 8), "float32"))


def test_what_other_threads_do_for_themselves_does_not_matter() -> None:
    class Decides(nn.Module):
        def forward(self, x):
            x.add_(1)
            return x * 2 if x.mean().item() > 0.5 else x

    mine = torch.zeros(8)
    is_done = threading.Event()
    worker = threading.Thread(target=lambda: [mine.add_(1) for _ in iter(is_done.is_set, True)])
    worker.start()
    profile = eo.profile(nn.Sequential(Decides(), Decides()), (2, 8))
    is_done.set()
    worker.join()
    assert not profile.totals.is_lower_bound


def test_sizes_that_are_read_one_by_one_are_no_work_elsewhere() -> None:
    class Crops(nn.Module):
        """Reads whole numbers and writes constants, as Keypoint R-CNN does for each of its boxes."""

        def forward(self, x):
            sizes = x.abs().ceil() + 1
            crops = torch.zeros(16, 1)
            for index in range(16):
                crops[index] = torch.zeros(int(sizes[index].item())).sum()
            return crops * torch.tensor(0.5)

    profile = eo.profile(Crops(), torch.rand(16))
    assert profile.trace.used_real_tensors and not profile.totals.is_lower_bound


def test_a_training_step_with_work_in_another_thread_is_a_lower_bound() -> None:
    step = eo.training_step(Handing("added_thread"), (2, 8), accumulate=2)
    assert step.cost.is_lower_bound
    assert step.unpriced == ("outside torch (another thread or C) in the model",)
    assert not eo.training_step(Handing("idle_thread"), (2, 8)).unpriced


def test_a_training_step_of_numpy_is_refused() -> None:
    with pytest.raises(TraceFailed, match="numpy"):
        eo.training_step(InNumpy(8, 8), (2, 8))


@pytest.mark.parametrize(
    ("model", "step"), [(InNumpy(8, 8), "forward"), (Handing("added_thread"), "train")], ids=["numpy", "train"]
)
def test_a_largest_batch_says_whose_memory_is_not_known(model: nn.Module, step: str) -> None:
    fit = eo.fit_batch(model, (8,), memory_limit_mb=1, max_batch=64, step=step)
    assert len(fit.outside) == 1
    assert f"{fit.outside[0]}: its memory is not known" in fit.remark


def test_rasp_says_that_work_in_numpy_is_a_lower_bound(capsys: pytest.CaptureFixture[str]) -> None:
    rasp.stat(InNumpy(8, 8), (2, 8))
    assert "outside torch (numpy); the figures are lower bounds" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["prune", "convert"])
def test_a_model_that_computes_in_numpy_is_not_modified(change: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), InNumpy(8, 8), nn.Linear(8, 4)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with suppress(EdgeOptError):
        if change == "prune":
            eo.compress.prune(model, (2, 8), 0.5)
        else:
            eo.compress.convert(model, torch.zeros(2, 8), "fp32", output=tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules())
