"""Inputs of a network: containers, rows, dtypes, parts of outputs, and modes."""

from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from ibnn import inputs

X, Y = torch.arange(6.0).view(3, 2), torch.arange(3)
TREE = {"x": X, "more": [Y, None, ("word", torch.tensor(7))]}


def test_tensors_come_in_order() -> None:
    assert [t.tolist() for t in inputs.tensors(TREE)] == [X.tolist(), Y.tolist(), 7]
    assert list(inputs.tensors(None)) == []


def test_tree_map_keeps_containers_and_other_values() -> None:
    mapped = inputs.tree_map(lambda t: t + 1, TREE)
    assert torch.equal(mapped["x"], X + 1)
    assert (type(mapped["more"]), mapped["more"][1], mapped["more"][2][0]) == (list, None, "word")
    assert torch.equal(TREE["x"], torch.arange(6.0).view(3, 2))  # the argument is left alone


@pytest.mark.parametrize("part", [slice(1, 3), torch.tensor([2, 0])], ids=["slice", "rows"])
def test_slice_rows_cuts_tensors_of_the_batch_s_length(part: slice | Tensor) -> None:
    table = torch.zeros(5, 2)  # shared by all rows
    cut = inputs.slice_rows({"x": X, "table": table, "scale": torch.tensor(2.0)}, part, rows=3)
    assert torch.equal(cut["x"], X[part])
    assert cut["table"] is table
    assert cut["scale"].item() == 2.0


@pytest.mark.parametrize(
    ("array", "dtype", "expected"),
    [
        (np.zeros(2), None, torch.float32),  # numpy's default is not meant
        (np.zeros(2, np.int64), None, torch.int64),
        (np.zeros(2), torch.float64, torch.float64),
        (torch.zeros(2, dtype=torch.float64), None, torch.float64),  # a tensor's is
        (torch.zeros(2, dtype=torch.float64), torch.float32, torch.float32),
        (torch.zeros(2), torch.float64, torch.float64),
        (torch.zeros(2), torch.bfloat16, torch.float32),
        (torch.zeros(2, dtype=torch.int64), torch.float64, torch.int64),
    ],
)
def test_dtypes_of_arrays(array: object, dtype: torch.dtype | None, expected: torch.dtype) -> None:
    converted = inputs.as_tensors({"a": [array], "b": "word"}, dtype)
    assert (converted["a"][0].dtype, converted["b"]) == (expected, "word")


def test_batch_length() -> None:
    assert inputs.batch_length({"none": None, "x": (X, torch.zeros(9))}) == 3
    for wrong in ((), torch.tensor(1.0), X[:0]):
        with pytest.raises(ValueError, match="`x` to be a batch of at least one row"):
            inputs.batch_length(wrong)
    with pytest.raises(TypeError, match="PackedSequence"):
        inputs.batch_length([pack_sequence([X])])


def test_batches_are_split_into_inputs_and_calls() -> None:
    assert inputs.split_inputs({"x": 1, "labels": 2}) == {"x": 1}
    assert [inputs.split_inputs(batch) for batch in ((1,), (1, 2), [1, 2, 3], 4)] == [1, 1, (1, 2), 4]
    assert inputs.call_arguments({"x": 1}) == ((), {"x": 1})
    assert inputs.call_arguments([1, 2]) == ((1, 2), {})
    assert inputs.call_arguments(3) == ((3,), {})


def test_rows_are_repeated_copy_by_copy() -> None:
    assert inputs.repeat_rows(Y, rows=3, samples=2).tolist() == [0, 1, 2, 0, 1, 2]
    assert inputs.repeat_rows(X, rows=3, samples=2).shape == (6, 2)
    for same in (inputs.repeat_rows(Y, 3, 1), inputs.repeat_rows(Y, 4, 2)):
        assert same is Y


def test_pick_follows_mappings_sequences_and_attributes() -> None:
    output = {"heads": [SimpleNamespace(age=5)]}
    assert inputs.pick(output, "heads.0.age") == 5
    assert inputs.pick(output, None) is output
    assert inputs.pick((3, 4), "-1") == 4
    for path in ("tails", "heads.1", "heads.0.sex"):
        with pytest.raises(ValueError, match=rf"`logits` to be a path into the network's output, '{path}'"):
            inputs.pick(output, path)


def test_logits_are_found_in_what_networks_return() -> None:
    for output in (X, {"logits": X}, OrderedDict(logits=X), SimpleNamespace(logits=X)):
        assert inputs.logits_of(output) is X
    with pytest.raises(TypeError, match="one that returns list"):
        inputs.logits_of([X])


def test_outputs_must_have_a_row_for_each_input() -> None:
    inputs.check_rows(X, 3)
    for output in (X[:2], torch.tensor(1.0)):
        with pytest.raises(ValueError, match="answers each of the 3 rows"):
            inputs.check_rows(output, 3)


def test_evaluating_restores_the_mode_of_each_module() -> None:
    net = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()).eval())
    before = [module.training for module in net.modules()]

    def modes_inside() -> list[bool]:
        with inputs.evaluating(net):
            return [module.training for module in net.modules()]

    assert modes_inside() == [False] * 4
    assert [module.training for module in net.modules()] == before == [True, True, False, False]
    with pytest.raises(ZeroDivisionError), inputs.evaluating(net):
        raise ZeroDivisionError
    assert [module.training for module in net.modules()] == before
