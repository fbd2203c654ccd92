import math
from collections import UserDict

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ibnn
from ibnn.prediction import evaluating

FIELDS = ("probs", "log_probs", "total", "aleatoric", "between", "within", "standard_error")


def make_model(**options: object) -> ibnn.IBNN:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.ReLU(), nn.Linear(7, 3))
    return ibnn.convert(net, components=3, seed=0, init_std=0.5, **options)  # type: ignore[arg-type]


def assert_same(a: ibnn.Prediction, b: ibnn.Prediction, fields: tuple[str, ...] = FIELDS) -> None:
    for name in fields:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-6, equal_nan=True)


def test_predict_averages_its_draws() -> None:
    model, x = make_model(), torch.randn(6, 5)
    p = model.predict(x, samples=4, seed=2)
    torch.testing.assert_close(p.probs, model.draw_logits(x, samples=4, seed=2).softmax(-1).mean(0))
    assert len(p) == 6


def test_chunks_loaders_and_rows_change_nothing() -> None:
    model, x = make_model(), torch.randn(23, 5)
    whole = model.predict(x)
    assert_same(model.predict(x, batch_size=4), whole)
    assert_same(model.predict(DataLoader(TensorDataset(x, torch.zeros(23)), batch_size=5)), whole)
    assert_same(
        model.predict(x[7:8]),
        type(whole)(
            *(
                getattr(whole, f)[7:8]
                for f in ("probs", "log_probs", "aleatoric", "between", "within", "standard_error")
            )
        ),
    )
    assert_same(model.predict(batch for batch in x.split(10)), whole)


def test_predict_ignores_and_restores_every_module_s_mode() -> None:
    model, x = make_model(), torch.randn(6, 5)
    model.train()
    model.net[1].eval()  # a frozen BatchNorm
    statistics = model.net[1].running_mean.clone()
    modes = [module.training for module in model.modules()]
    training = model.predict(x)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model.net[1].running_mean, statistics)
    assert torch.equal(training.probs, model.eval().predict(x).probs)


def test_modes_are_restored_after_an_error() -> None:
    model = make_model().train()
    with pytest.raises(RuntimeError), evaluating(model):
        model.draw_logits(torch.randn(2, 4))
    assert model.training
    assert model.net[2].training


def test_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 3)

        def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            return (self.a(a) + self.b(b)) * scale

    model = ibnn.convert(Two(), components=2, seed=0)
    a, b = torch.randn(9, 4), torch.randn(9, 2)
    by_position = model.predict((a, b))
    assert_same(model.predict({"a": a, "b": b}), by_position)
    assert_same(model.predict({"a": a, "b": b}, batch_size=2), by_position)
    rows = [{"a": a[i], "b": b[i], "labels": 0} for i in range(9)]
    assert_same(model.predict(DataLoader(rows, batch_size=4)), by_position)
    pairs = [((a[i], b[i]), 0) for i in range(9)]
    assert_same(model.predict(DataLoader(pairs, batch_size=4)), by_position)
    triples = TensorDataset(a, b, torch.zeros(9))  # as fit reads them: the last entry is the target
    assert_same(model.predict(DataLoader(triples, batch_size=4)), by_position)
    assert_same(model.predict((a.numpy(), b.numpy())), by_position)
    assert_same(model.predict(UserDict(a=a, b=b)), by_position)
    torch.testing.assert_close(model.eval()(a, b=b), model(a, b))
    labels = torch.randint(3, (9,))
    assert model.elbo({"a": a, "b": b}, labels, n_data=9, samples=2).nll.isfinite()


def test_regression() -> None:
    model = ibnn.convert(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), likelihood="gaussian", seed=0)
    x = torch.randn(11, 2)
    p = model.predict(x, batch_size=3)
    draws = model.draw_logits(x)
    torch.testing.assert_close(p.mean, draws.mean(0))
    torch.testing.assert_close(p.epistemic, draws.var(0, correction=0), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(p.draw_means, draws)
    low, high = p.interval(0.9)
    assert (low < p.mean).all()
    assert (p.mean < high).all()
    model.eval_samples = 5
    torch.testing.assert_close(model.eval()(x), p.mean)
    model.eval_samples = 0
    torch.testing.assert_close(model(x), torch.stack([model.component(k)(x) for k in range(8)]).mean(0))


def test_memory_stays_bounded() -> None:
    model = make_model()
    seen = []
    model.net[0].register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    model.predict(torch.randn(100, 5), batch_size=16)
    assert max(seen) == 16


def test_prediction_moves_and_joins() -> None:
    p = make_model().predict(torch.randn(5, 5))
    joined = type(p).cat([p, p.to("cpu")])
    assert len(joined) == 10
    assert torch.equal(joined.total[5:], p.total)


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        (torch.tensor([[0.0] * 5, [math.nan] * 5]), "input 0.*NaN in row 1"),
        (torch.full((3, 5, 2, 2), math.nan).to(memory_format=torch.channels_last), "NaN in row 0"),
        (torch.empty(0, 5), "at least one row"),
        (DataLoader(TensorDataset(torch.tensor([[0.0] * 5] * 5 + [[math.nan] * 5])), batch_size=2), "NaN in row 5"),
        (iter([]), "an empty loader"),
    ],
)
def test_bad_inputs(inputs: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_model().predict(inputs)


@pytest.mark.parametrize("argument", ["samples", "batch_size"])
def test_bad_sizes(argument: str) -> None:
    with pytest.raises(ValueError, match=f"`{argument}` to be an integer of at least 1, but got 0"):
        make_model().predict(torch.randn(2, 5), **{argument: 0})
