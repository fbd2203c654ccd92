from typing import Any

import pytest
import torch
from fit_job import make_data, make_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset

import ibnn
from ibnn.batches import Source, as_source
from ibnn.training.data import HeldOut, count_targets, hold_out


@pytest.mark.parametrize(
    ("rows", "out"), [(500, 100), (999, 100), (1000, 100), (1010, 101), (50_000, 5000), (90_000, 5000)]
)
def test_held_out_rows(rows: int, out: int) -> None:
    source = as_source((torch.zeros(rows, 1), torch.zeros(rows)), batch_size=128)
    held_out = hold_out(source, None, seed=0).held_out
    assert held_out is not None
    assert held_out.rows == out


class Rows(Dataset[Any]):
    """Examples that know their number."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((1,), float(index)), torch.tensor(index)


NUMBERS = torch.arange(600.0)[:, None], torch.arange(600)
KINDS = {
    "tensors": NUMBERS,
    "arrays": tuple(part.numpy() for part in NUMBERS),
    "dict": ({"a": NUMBERS[0], "b": (NUMBERS[0] + 1,)}, NUMBERS[1]),
    "dataset": Rows(600),
    "subset": Subset(Rows(1000), range(600)),
    "loader": DataLoader(Rows(600), batch_size=32, shuffle=True),
    "dropping": DataLoader(Rows(600), batch_size=32, shuffle=True, drop_last=True),
}


def numbers(source: Source) -> list[int]:
    """Targets of an epoch; the inputs are checked against them."""
    found = []
    for share in source.epoch(0, 0):
        x = share.x["a"] if isinstance(share.x, dict) else share.x
        assert x.flatten().tolist() == share.y.tolist()
        if isinstance(share.x, dict):
            assert (share.x["b"][0] - 1).flatten().tolist() == share.y.tolist()
        found += share.y.tolist()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_the_data_is_held_out(kind: str) -> None:
    whole = as_source(KINDS[kind], batch_size=32)
    source, held_out, given, note = hold_out(whole, None, seed=3)
    assert held_out is not None
    assert (given, note) == (600, "")
    assert (source.rows, held_out.rows) == (500, 100)
    train, out = numbers(source), numbers(held_out)
    assert set(train) <= set(range(600)) - set(out)
    assert len(set(train)) == len(train) == (480 if kind == "dropping" else 500)
    assert len(set(out)) == 100
    assert out == sorted(out) == numbers(held_out)
    assert train != sorted(train)
    assert (source.shuffled, held_out.shuffled, held_out.drop_last) == (True, False, False)
    others = hold_out(whole, None, seed=4).held_out
    assert others is not None
    assert numbers(others) != out
    assert [n for n in out if n >= 300]  # from all over


@pytest.mark.parametrize("dataset", [False, True])
def test_held_out_data_are_scored_as_by_hand(dataset: bool) -> None:
    model = ibnn.convert(make_net("linear"), components=2, seed=0)
    x, y = make_data(60)
    source = as_source(TensorDataset(x, y) if dataset else (x, y), batch_size=16, shuffled=False)
    held_out = HeldOut(model, source, torch.device("cpu"), seed=0)
    logs = model.draw_logits(x, 3).log_softmax(-1).logsumexp(0) - torch.tensor(6.0).log()
    assert held_out.scores(3)["nll"] == pytest.approx(-logs[range(60), y].mean().item(), rel=1e-5)


def test_draws_are_of_a_random_part_with_its_own_targets() -> None:
    """Rows say their number, in the input and in the target; the network repeats it."""
    net = torch.nn.Linear(1, 2, bias=False)
    net.weight.data.fill_(1.0)
    model = ibnn.convert(net, components=3, seed=0)
    model.set_posterior(mean=1.0, std=0.0)
    held_out = HeldOut(model, as_source(NUMBERS, batch_size=32, shuffled=False), torch.device("cpu"), seed=0)
    outputs, targets = held_out.draws(2, 50)
    assert outputs.shape == (3, 2, 50, 2)
    assert targets.tolist() != list(range(50))
    assert torch.equal(outputs, targets.float()[:, None].expand(3, 2, 50, 2))
    assert torch.equal(held_out.draws(2, 10**6)[1], NUMBERS[1])


def test_targets_that_are_padded_batch_by_batch_are_refused() -> None:
    """With and without `valid`, before the first step; a loader of them is not predicted as one."""

    def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        x = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return x[..., None], (x > 0).long()

    rows = [torch.randn(3 + i // 60) for i in range(600)]
    loader = DataLoader(rows, batch_size=60, collate_fn=padded)  # type: ignore[arg-type]
    model = ibnn.convert(nn.Linear(1, 2), components=2, likelihood=ibnn.Categorical(axis=-1), seed=0)
    refused = r"`{}` to be batches with targets of one shape.*\(B, \d+\) and \(B, \d+\)\. Pad them to one length"
    for name, valid, options in (("valid", loader, {}), ("valid", loader, {"beta": 1.0}), ("train", None, {})):
        with pytest.raises(ValueError, match=refused.format(name)):
            ibnn.fit(model, loader, valid, epochs=1, quiet=True, **options)
    with pytest.raises(ValueError, match=r"batches with outputs of one shape.*Pad them to one length"):
        model.predict(loader)
    assert ibnn.fit(model, loader, epochs=1, beta=1.0, quiet=True).stopped == "finished"


def test_targets_are_counted_in_tensors_and_guessed_from_the_first_batch() -> None:
    likelihood = ibnn.Categorical()
    y = torch.zeros(40, 3, dtype=torch.long)
    y[20:] = -100
    data = torch.zeros(40, 2), y
    assert count_targets(likelihood, as_source(data, batch_size=8)) == 60
    ordered = as_source(TensorDataset(*data), batch_size=8, shuffled=False)
    assert count_targets(likelihood, ordered) == 120  # the first batch ignores none


def learn(train: Any, valid: Any = None, **options: Any) -> ibnn.IBNN:
    torch.manual_seed(0)
    model = ibnn.convert(nn.Linear(4, 3), components=2, seed=0)
    ibnn.fit(model, train, valid, steps=2, beta=1.0, quiet=True, **options)
    return model


def test_a_pair_is_asked_for() -> None:
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    for call in (learn, lambda *data: ibnn.calibrate(ibnn.convert(nn.Linear(4, 3), seed=0), *data)):
        for data in ((x, y), (x.numpy(), y.numpy())):
            with pytest.raises(TypeError, match=r"as a pair: .*\(x, y\)"):
                call(*data)
    with pytest.raises(TypeError, match=r"as a pair: .*\(x, y\)"):
        ibnn.calibrate(ibnn.convert(nn.Linear(4, 3), seed=0), x)


@pytest.mark.parametrize("rows", [2, 60])
def test_a_list_of_dicts_is_a_dataset(rows: int) -> None:
    class Named(nn.Linear):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return super().forward(features)

    x, y = torch.randn(rows, 4), torch.arange(rows) % 3
    kinds: list[Any] = [
        [{"features": a, "labels": int(b)} for a, b in zip(x, y, strict=True)],
        [{"features": a.tolist(), "labels": b} for a, b in zip(x, y, strict=True)],
        [{"features": a.numpy(), "labels": b} for a, b in zip(x, y, strict=True)],
    ]
    found = []
    for data in ({"features": x}, y), *kinds:
        torch.manual_seed(0)
        model = ibnn.convert(Named(4, 3), components=2, seed=0)
        ibnn.fit(model, data, steps=2, beta=1.0, quiet=True)
        found.append(model.net.weight)
    assert all(torch.equal(found[0], other) for other in found[1:])
    with pytest.raises(TypeError, match=r"`train`.*'features' are numbers"):
        learn([{"features": "words", "labels": 1}] * rows)


def test_shared_rows_are_told_before_training(caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.randn(300, 4), torch.arange(300) % 3
    whole = TensorDataset(x, y)
    plain = [(x[row], y[row]) for row in range(300)]

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 300

        def __getitem__(self, row: int) -> Any:
            return plain[row]

    rows = Rows()
    overlapping: list[Any] = [
        ((x, y), (x[:100], y[:100])),
        ((x[:200], y[:200]), (x[150:], y[150:])),
        (whole, whole),
        (whole, TensorDataset(x[:50], y[:50])),
    ]
    for train, valid in overlapping:
        caplog.clear()
        learn(train, valid)
        assert caplog.text.count("`valid` shares rows with `train`") == 1
    caplog.clear()
    for train, valid in (
        ((x[:200], y[:200]), (x[200:], y[200:])),
        (Subset(rows, range(200)), Subset(rows, range(200, 300))),
        (whole, (torch.randn(100, 4), y[:100])),
        ((x, y), (x, (y + 1) % 3)),  # as of a graph whose nodes have other labels
        *[tuple(DataLoader(rows, sampler=SubsetRandomSampler(part)) for part in (range(200), range(200, 300)))],
    ):
        learn(train, valid)
    assert not caplog.text


def test_probabilities_for_logits_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Softmaxed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).softmax(-1)

    x, y = torch.randn(60, 4), torch.arange(60) % 3
    ibnn.fit(ibnn.convert(Softmaxed(4, 3), components=2, seed=0), (x, y), (x[:50] + 1, y[:50]), steps=2, quiet=True)
    assert caplog.text.count("ends in a softmax") == 1
    caplog.clear()
    learn((x, y))
    assert not caplog.text
