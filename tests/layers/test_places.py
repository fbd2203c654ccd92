"""Where layers see the batch: first or not, with windows or copies of its rows folded in, in their order or not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ibnn
from ibnn.draws import Draws
from ibnn.network import folded


def gap(model: ibnn.IBNN, *x: Tensor) -> float:
    """How far a training pass is from the plain networks of the rows' own draws, one row at a time."""
    drawn = model._training_draws(model.posterior(), len(x[0]))
    one_by_one = Draws(drawn.z, drawn.words, drawn.unit_std)
    expected = [folded(model, one_by_one[i]).train()(*(t[i : i + 1] for t in x)) for i in range(len(x[0]))]
    return float((model(*x) - torch.cat(expected)).detach().abs().max())


def trained(net: nn.Module, **options: object) -> ibnn.IBNN:
    return ibnn.convert(net.double(), components=2, init_std=0.3, likelihood="gaussian", seed=0, **options).train()


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Views(nn.Module):
    """Two views of each row in one batch, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inner(torch.cat([x, x.flip(1)])).relu().chunk(2)
        return self.head(a + b)


class Steps(nn.Module):
    """Recurrent, with all steps of the batch in one axis, the first step of all rows first."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.rnn(x.transpose(0, 1))
        return self.head(steps.flatten(0, 1)).unflatten(0, steps.shape[:2]).mean(0)


class Frames(nn.Module):
    """Images of a film, the first of all rows first, or those of a row side by side."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.inner, self.head, self.together = nn.Conv2d(6, 4, 3), nn.Linear(4, 3), together

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.together else x.transpose(0, 1)
        seen = self.inner(x.flatten(0, 1)).relu().mean((2, 3)).unflatten(0, x.shape[:2])
        return self.head(seen.mean(1 if self.together else 0))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "views": (Views, (6,)),
    "steps": (Steps, (7, 5)),
    "frames": (lambda: Frames(together=False), (4, 6, 5, 5)),
    "frames side by side": (lambda: Frames(together=True), (4, 6, 5, 5)),
}


@pytest.mark.parametrize("length", [1, 4, 7])
@pytest.mark.parametrize("case", CASES)
def test_what_is_folded_into_the_batch_keeps_the_z_of_its_row(case: str, length: int) -> None:
    make, shape = CASES[case]
    model, x = trained(make()), rows(length, *shape)
    assert gap(model, x) < 1e-12
    assert gap(model, x[:1]) < 1e-12
    drawn = ibnn.draws(model, x)
    assert torch.allclose(drawn[1, 0], model.draw(1)(x), atol=1e-12)
    if case != "frames side by side":
        with pytest.raises(ValueError, match=r"`net` to be one that folds things into its batch row by row"):
            ibnn.export(model, x, "nowhere.pt2", format="torch")


class Sorted(Views):
    """Goes through the rows in another order."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.head(self.inner(x[order])[order.argsort()])


class Prototypes(nn.Module):
    """Compares rows with what is the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(4, 8), nn.Linear(3, 8)
        self.register_buffer("prototypes", torch.randn(10, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.image(x) @ self.text(self.prototypes).T


def test_rows_in_another_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"input of layer 'inner'.*rows in their order.*exclude=\['inner'\]"):
        trained(Sorted())(torch.tensor([[3.0], [1.0], [2.0], [0.0]]).double() + torch.arange(6))
    assert gap(trained(Sorted(), exclude="inner"), rows(5, 6)) < 1e-12


@pytest.mark.parametrize("length", [1, 5, 10])
def test_as_many_things_as_rows_are_no_batch(length: int) -> None:
    with pytest.raises(ValueError, match=r"input of layer 'text'.*exclude=\['text'\]"):
        trained(Prototypes())(rows(length, 4))


class Coupled(nn.Module):
    """Rows that affect each other: nothing can be said about their order, and nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.inner(x)).relu())


@pytest.mark.parametrize("length", [2, 7, 2000])
def test_rows_that_affect_each_other_are_no_other_order(length: int) -> None:
    assert trained(Coupled())(rows(length, 6)).shape == (length, 3)


class Unpadded(nn.Module):
    """Computes with the steps that are there alone, all rows in one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = x.new_zeros(*mask.shape, 8)
        out[mask] = self.inner(x[mask]).relu()
        return self.head(out.sum(1))


def test_another_number_of_entries_for_a_row_is_looked_at_again() -> None:
    model, x, full = trained(Unpadded()), rows(2, 6, 4), torch.ones(2, 6, dtype=torch.bool)
    ragged = full.clone()
    ragged[0, 2:] = False
    for _ in range(2):
        assert gap(model, x, full) < 1e-12
        with pytest.raises(ValueError, match=r"input of layer 'inner'.*\(8, 4\) for 2 rows"):
            model(x, ragged)
    assert gap(model, x[:, :3], full[:, :3]) < 1e-12


def test_predictions_do_not_depend_on_masks_that_were_seen_before() -> None:
    x, full = rows(2, 6, 4), torch.ones(2, 6, dtype=torch.bool)
    odd = full.clone()
    odd[0, 1:] = False
    model, other = trained(Unpadded()), trained(Unpadded())
    other.load_state_dict(model.state_dict())
    model.predict((x, full))
    assert torch.allclose(model.predict((x, odd)).mean, other.predict((x, odd)).mean, atol=1e-12)


class Late(nn.Module):
    """Calls a layer, which sees the batch second, only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.on = nn.Linear(4, 3), nn.Linear(3, 3), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (self.second(x.transpose(0, 1)).transpose(0, 1) if self.on else x).mean(1)


@pytest.mark.parametrize("length", [4, 8, 5])
def test_a_layer_that_is_called_later_finds_the_batch(length: int) -> None:
    model, x = trained(Late()), rows(4, length, 4)
    assert gap(model, x) < 1e-12
    model.net.on = True
    assert gap(model, x) < 1e-12


def test_the_search_leaves_generators_and_statistics_alone() -> None:
    class Noisy(Views):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x + torch.randn_like(x)))

    net = nn.Sequential(nn.BatchNorm1d(6), Noisy(), nn.Dropout())
    outputs, means = [], []
    for searched in (False, True):
        model = trained(net)
        model._searches = int(searched)  # as if it had been done
        torch.manual_seed(3)
        outputs.append(model(torch.ones(4, 6, dtype=torch.float64)))
        means.append(model.net[0].running_mean.clone())
    assert torch.equal(*outputs)
    assert torch.equal(*means)


class Turned(nn.Module):
    """Swaps the first two axes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


def test_users_modules_whose_names_end_like_latents() -> None:
    net = nn.Sequential()
    for name, module in (("in_latent", Turned()), ("fc", nn.Linear(4, 3)), ("out_latent", Turned())):
        net.add_module(name, module)
    assert gap(trained(net), rows(6, 6, 4)) < 1e-12


def test_a_sequence_of_torch_layers_is_searched_once() -> None:
    model = trained(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))))
    for _ in range(3):
        model(rows(5, 4))
    assert model._searches == 1


def test_factors_of_units_of_an_input_without_a_batch() -> None:
    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Conv1d(6, 4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.stack([self.inner(one).relu().mean(-1) for one in x]))

    model, x = trained(Each()).eval(), rows(5, 6, 9)
    model.set_posterior(unit_std=0.5)
    assert torch.allclose(ibnn.draws(model, x)[1, 0], model.draw(1)(x), atol=1e-12)


def test_a_draw_forgets_its_factors_when_another_is_loaded() -> None:
    model, x = trained(Frames(together=True)), rows(2, 4, 6, 5, 5)
    model.set_posterior(unit_std=0.5)
    one, other = model.draw(0), model.draw(1)
    one(x)
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(x), other(x))
