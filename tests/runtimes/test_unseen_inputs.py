"""Static int8 is compared on inputs that its ranges never saw, and what is ruined there is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from convertible import Tokens
from edge_opt import compress
from edge_opt._support.json import from_plain, to_plain
from edge_opt.errors import ConversionFailed, Disagrees
from edge_opt.quantization.onnx_files import FloatFile, collect_ranges
from edge_opt.records.conversions import Agreement, UnseenAgreement
from edge_opt.report.record_sheets import agreement_text
from edge_opt.runtimes.agreement import ReferenceModel, agreement, first_violation, rolled, split, unseen_agreement
from edge_opt.runtimes.model_call import LabeledBatches, model_call
from edge_opt.runtimes.torch_runtime import TorchRunner
from needed import needed
from zoo import torchvision_models

# Sixteen calls of two samples, as benchmarks/shrink_zoo.py calibrates.
CALLS = 16


def small_mpnet() -> nn.Module:
    """Its classifier reads the first token. Embedding and position of the padding are zero, and the norm behind them
    divides what is left by nearly nothing: what int8 rounds there is all there is."""
    torchvision_models()  # transformers imports it
    transformers = needed("transformers")
    config = transformers.MPNetConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    model: nn.Module = transformers.MPNetForSequenceClassification(config).eval()
    return model


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.randint(0, 100, (2, 16))} for _ in range(count)]


def test_a_token_that_calibration_had_in_other_places_ruins_no_accepted_model() -> None:
    torch.manual_seed(0)
    model, example, calls = small_mpnet(), *sequences(1), sequences(CALLS)
    padding = 1
    is_there = [padding in call["input_ids"] for call in calls]
    assert any(is_there) and all(padding not in call["input_ids"][:, 0] for call in calls)
    with pytest.raises(Disagrees) as raised:
        compress.convert(model, None, "int8", kwargs=example, scheme="static", calibration=calls)
    message = str(raised.value)
    assert "rolled so that other tokens come first, a sample differs by" in message
    assert "50.0% is allowed for a single one (at batch 1, 2, 512 by at most" in message
    assert all(
        cure in message
        for cure in ("more data", "scheme='dynamic'", "keep_float='auto'", "verify_on=", "max_difference=")
    )


def test_a_model_that_reads_all_places_alike_passes_with_its_sequences_rolled() -> None:
    torch.manual_seed(0)
    calls = [torch.randint(0, 20, (4, 6)) for _ in range(8)]
    done = compress.convert(Tokens(), [calls[0]], "int8", scheme="static", calibration=calls)
    held_out, other_tokens = done.agreement.unseen
    # One of four batches of eight: two, of four samples. Of all samples, the five places behind the first have a turn.
    assert (held_out.kind, held_out.samples, held_out.source) == (
        "held out", 2 * 4, "8 calibration samples, with ranges of the others",
    )  # fmt: skip
    assert (other_tokens.kind, other_tokens.samples) == ("rolled", 8 * 4 * 5)
    assert done.agreement.relative_difference == max(
        entry.difference for entry in (*done.agreement.by_batch, *done.agreement.unseen) if entry.difference is not None
    )
    assert f"; {held_out.difference * 100:.1f}% on 8 calibration samples, with" in agreement_text(done.agreement)


def test_ranges_that_change_from_batch_to_batch_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    batches = [torch.randn(32, 16) for _ in range(3)]
    # The fourth is five times as large. With its ranges all is well; with those of the others a part of it is cut off.
    batches.append(5 * batches[0])
    with pytest.raises(Disagrees, match="on 32 calibration samples, with ranges of the others, outputs differ by"):
        compress.convert(model, (1, 16), "int8", calibration=batches, output=tmp_path)
    assert list(tmp_path.iterdir()) == []
    done = compress.convert(model, (1, 16), "int8", calibration=[*batches, *batches], output=tmp_path)
    assert done.agreement.unseen[0].difference < 0.1


def test_batches_of_the_caller_s_and_allow_true_are_compared_alone() -> None:
    model, batches = nn.Linear(16, 8), [torch.randn(32, 16)]
    for options in ({"verify_on": batches}, {"max_difference": True}):
        done = compress.convert(model, (1, 16), "int8", calibration=batches, **options)
        assert done.agreement.unseen == ()
    assert compress.convert(model, (1, 16), "int8", scheme="dynamic", calibration=batches).agreement.unseen == ()


def test_layers_are_spared_until_unseen_samples_agree_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    batches = [torch.randn(32, 16) for _ in range(3)]
    batches.append(5 * batches[0])
    # The ranges of the input are what is missing, and they are the first layer's, whichever other one is spared.
    with pytest.raises(ConversionFailed, match="while any layer is in int8: on 32 calibration samples, with ranges of"):
        compress.convert(model, (1, 16), "int8", calibration=batches, keep_float="auto")


def test_one_of_four_batches_is_held_out_up_to_64_samples() -> None:
    batches = [(torch.full((2, 3), float(number)),) for number in range(17)]
    kept, held = split(batches, None)
    # The last of the first four, the third of the next, and so on; the seventeenth is in no group of four.
    assert [int(batch[0][0, 0]) for batch in held] == [3, 6, 9, 12]
    assert [int(batch[0][0, 0]) for batch in kept] == [0, 1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 15, 16]
    # 40 samples are fewer than 64, 80 are not.
    assert len(split([(torch.zeros(40, 3),)] * 32, None)[1]) == 2


def test_a_quarter_of_the_samples_is_held_out_of_few_batches() -> None:
    batch = (torch.arange(10.0)[:, None], torch.ones(3))
    [kept], [held] = split([batch], None)
    # The last of the first four, the third of the next; what is not one for each sample goes along.
    assert kept[0].flatten().tolist() == [0, 1, 2, 4, 5, 7, 8, 9] and held[0].flatten().tolist() == [3, 6]
    assert len(kept[1]) == len(held[1]) == 3
    assert split([batch], 10) == ([batch], []) and split([(torch.zeros(7, 1),)], None)[1] == []
    assert len(split([(torch.zeros(1000, 1),)], None)[1][0][0]) == 64


def test_each_token_is_rolled_to_the_front_with_its_mask() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [4, 7, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    found = rolled(("input_ids", "attention_mask"), [(ids, mask)])
    # 5 and 4 lead already, 0 is hidden; 7 is there three times, 6 and 8 once. Then 7 from its other places.
    assert found is not None
    assert found[0].tolist() == [[7, 0, 5, 6], [6, 7, 0, 5], [8, 4, 7, 7], [7, 7, 8, 4], [7, 8, 4, 7]]
    assert found[1].tolist() == [[1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert [row[0] for row in rolled(("ids",), [(ids,)], 2)[0].tolist()] == [7, 0]  # type: ignore[index]
    assert rolled(("ids", "mask"), [(ids, torch.zeros_like(ids))]) is None


def test_what_all_samples_begin_with_stays_in_front() -> None:
    found = rolled(("ids",), [(torch.tensor([[5, 6, 7, 8], [5, 9, 9, 0]]),)])
    # 9 is there twice behind the 5, once where it may be rolled from; then 0, 7 and 8, in the order of their numbers.
    assert found is not None
    assert found[0].tolist() == [[5, 0, 9, 9], [5, 7, 8, 6], [5, 8, 6, 7], [5, 9, 0, 9]]
    assert rolled(("ids",), [(torch.tensor([[5, 6], [5, 6]]),)]) is None


def test_ranges_without_what_was_held_out_are_found_in_the_same_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "relu.onnx"
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), str(file))
    near, far = (torch.tensor([[-1.0, 0.0, 1.0, 2.0]]),), (torch.tensor([[-3.0, 0.0, 1.0, 8.0]]),)
    runs = []
    session = needed("onnxruntime").InferenceSession

    class Counting(session):  # type: ignore[misc, valid-type]
        def run(self, *args: Any) -> Any:
            runs.append(1)
            return super().run(*args)

    monkeypatch.setattr("onnxruntime.InferenceSession", Counting)
    source = FloatFile(file, onnx.load(str(file)), {}, is_big=False)
    ranges, ranges_without_held_out = collect_ranges(source, ("x",), [near], [far])
    assert ranges == {"x": (-3.0, 8.0), "y": (0.0, 8.0)}
    assert ranges_without_held_out == {"x": (-1.0, 2.0), "y": (0.0, 2.0)}
    assert len(runs) == 2


class OneOff(nn.Module):
    """The last sample 1.6 times its size, the others as they are."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.cat([x[:-1], x[-1:] * 1.6]),)


def test_one_sample_that_is_far_off_is_not_hidden_by_the_others() -> None:
    x = torch.ones(20, 4)
    x[-1] = 2.0
    original = ReferenceModel(model_call(nn.Identity(), (1, 4)))
    found = agreement(original, TorchRunner(OneOff(), 1), LabeledBatches([(x,)], [None], "a test"), 20)
    [entry] = found.by_batch
    # 0.6 x 2 in one of twenty, over a mean of 21 / 20; of that sample, over its own mean, which is more
    assert entry.difference == pytest.approx(1.2 / 21) and entry.worst_sample == pytest.approx(0.6)
    trouble = first_violation(found, 0.2)
    assert trouble is not None and trouble.text == (
        "at batch 20 a sample differs by 60.0% of the mean output, 50.0% is allowed for a single one"
    )
    assert first_violation(found, 0.25) is None and first_violation(found, 0.2, 0.7) is None


class Shifted(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + 0.1,)


def test_a_few_unseen_samples_that_are_small_by_chance_are_judged_by_the_scale_of_all() -> None:
    original, small, usual = (
        ReferenceModel(model_call(nn.Identity(), (1, 4))),
        torch.full((2, 4), 0.1),
        torch.ones(8, 4),
    )
    runner, file = TorchRunner(Shifted(), 1), Path("shifted")
    found = unseen_agreement(original, runner, file, [(small,)], "rolled", "a test", [(usual,)])
    # 0.1 over 1, the mean of the others; over their own it would be all of it
    assert found is not None and found.agreement.difference == pytest.approx(0.1)
    assert found.agreement.worst_sample == pytest.approx(0.1)


def on_unseen(kind: Any, difference: float, error: float, worst_sample: float) -> Agreement:
    entry = UnseenAgreement(kind, "16 samples", 16, difference, error, 0, 0.3, worst_sample)
    return Agreement(0.1, 0.1, 1.0, None, 2, 1, "a test", unseen=(entry,))


def test_what_was_held_out_is_judged_beyond_chance_and_rolled_sequences_one_by_one_too() -> None:
    # 0.25 is 0.04 more than 0.2 and the error; a share of flips may be 0.1 and a quarter, 1 over the root of 16
    trouble = first_violation(on_unseen("held out", 0.25, 0.01, 0.9), 0.2)
    assert (
        trouble is not None and trouble.text == "on 16 samples, outputs differ by 25.0% of their mean, 21.0% is allowed"
    )
    assert first_violation(on_unseen("held out", 0.25, 0.06, 0.9), 0.2) is None
    trouble = first_violation(on_unseen("rolled", 0.25, 0.06, 0.9), 0.2)
    assert trouble is not None and "a sample differs by 90.0% of the mean output, 50.0% is allowed" in trouble.text


def test_agreements_that_were_saved_before_can_be_read() -> None:
    torch.manual_seed(0)
    calls = [torch.randint(0, 20, (4, 6)) for _ in range(4)]
    found = compress.convert(Tokens(), [calls[0]], "int8", scheme="static", calibration=calls).agreement
    plain = to_plain(found)
    assert from_plain(Agreement, plain) == found and len(plain["unseen"]) == 2
    del plain["unseen"]
    for entry in plain["by_batch"]:
        del entry["worst_sample"]
    older = from_plain(Agreement, plain)
    assert older.unseen == () and older.by_batch[0].worst_sample is None
