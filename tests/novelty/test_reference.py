"""Statistics of layers' inputs against independent ones, and what layers see against slow loops."""

import cases
import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import ibnn
from ibnn.normal import Space, address, words
from ibnn.novelty.measure import measure
from ibnn.novelty.nodes import observable, padding, watched
from ibnn.novelty.reference import Reference, fit_layers, shrunk_covariance


@pytest.mark.parametrize(("rows", "width"), [(30, 50), (500, 7), (40, 1)])
def test_shrunk_covariance_is_that_of_scikit_learn(rows, width):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, dtype=torch.float64, generator=generator) @ torch.randn(
        width, width, dtype=torch.float64, generator=generator
    )
    x = x - x.mean(0)
    expected, _ = ledoit_wolf(x.numpy(), assume_centered=True)
    np.testing.assert_allclose(shrunk_covariance(x).numpy(), expected, rtol=1e-10, atol=1e-12)


def made(rows, labels=None, widths=None):
    """A reference of layers whose reduced summaries are the given rows."""
    whiten, centres = fit_layers(rows, labels)
    widths = widths or [[part.shape[1]] * 2 for part in rows]
    raw = sum(width for width, _ in widths)
    return Reference(
        layers=torch.arange(len(rows)), axes=torch.zeros(len(rows)), widths=torch.tensor(widths),
        shift=torch.zeros(raw), scale=torch.ones(raw), whiten=whiten[None], centres=centres[None],
    )  # fmt: skip


def test_distances_are_those_of_mahalanobis():
    generator = torch.Generator().manual_seed(1)
    layers = [torch.randn(200, width, generator=generator) * torch.arange(1.0, width + 1) for width in (3, 5)]
    new = [torch.randn(4, width, generator=generator) * 3 for width in (3, 5)]
    found = made(layers).distances(0, new)
    for number in range(2):
        known = layers[number].double().numpy()
        covariance, _ = ledoit_wolf(known)
        gap = new[number].double().numpy() - known.mean(0)
        expected = np.einsum("bi,ij,bj->b", gap, np.linalg.inv(covariance), gap)
        np.testing.assert_allclose(found[number].numpy(), expected, rtol=1e-3)


def test_distances_are_to_the_nearest_class():
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(300) % 3
    centres = torch.tensor([[0.0, 0.0], [5.0, 0.0], [0.0, 5.0]])
    known = centres[labels] + torch.randn(300, 2, generator=generator)
    new = torch.tensor([[5.0, 0.5], [2.5, 2.5]])
    found = made([known], labels).distances(0, [new])[0]
    x = known.double().numpy()
    means = np.stack([x[labels.numpy() == c].mean(0) for c in range(3)])
    covariance, _ = ledoit_wolf(x - means[labels.numpy()], assume_centered=True)
    gap = new.double().numpy()[:, None] - means
    expected = np.einsum("bci,ij,bcj->bc", gap, np.linalg.inv(covariance), gap).min(1)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3)


def test_wide_layers_are_projected_alike_everywhere():
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(5, 600, generator=generator)
    one, other = (made([torch.randn(300, 256, generator=generator)], widths=[[600, 256]]) for _ in range(2))
    torch.testing.assert_close(one.reduce(0, wide), other.reduce(0, wide))
    projected = one.reduce(0, wide)
    assert projected.shape == (5, 256)
    # signs and groups: every entry goes to one number, so the sum of squares over one-hot rows is 1
    assert torch.equal(one.reduce(0, torch.eye(600)).square().sum(1), torch.ones(600))
    groups = one.reduce(0, torch.eye(600)).abs().sum(0)
    assert groups.min() >= 2
    assert groups.max() <= 3


def seen(net, x, axes=None, mask=None):
    layers = observable(net)
    rows = len(x[0]) if isinstance(x, tuple) else len(x)
    with torch.no_grad(), watched(layers, axes or dict.fromkeys(layers, 0), rows, mask) as found:
        net(*x) if isinstance(x, tuple) else net(x)
    return found


def test_what_a_convolution_sees_is_mean_and_deviation_of_channels():
    x = torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    found = seen(nn.Conv2d(2, 4, 3), x)[""]
    for row in range(3):
        for channel in range(2):
            values = x[row, channel].flatten().double().numpy()
            assert found[row, channel].item() == pytest.approx(values.mean(), abs=1e-6)
            assert found[row, 2 + channel].item() == pytest.approx(values.std(), abs=1e-6)


def test_what_a_linear_layer_sees_is_its_input_or_mean_and_deviation_over_steps():
    x = torch.randn(4, 3)
    assert torch.equal(seen(nn.Linear(3, 2), x)[""], x)
    steps = torch.randn(4, 6, 3)
    expected = torch.cat([steps.mean(1), steps.std(1, correction=0)], 1)
    torch.testing.assert_close(seen(nn.Linear(3, 2), steps)[""], expected)


def test_padding_does_not_count():
    x, mask = torch.randn(2, 5, 3), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    found = seen(nn.Linear(3, 2), x, mask=mask)[""]
    short = seen(nn.Linear(3, 2), x[1:, :2])[""]
    torch.testing.assert_close(found[1:], short)
    changed = x.clone()
    changed[1, 2:] = 99.0
    assert torch.equal(seen(nn.Linear(3, 2), changed, mask=mask)[""], found)


def test_packed_sequences_are_seen_without_padding():
    class Packs(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)

        def forward(self, x, lengths):
            return self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1][0]

    x, lengths = torch.randn(3, 5, 3), torch.tensor([2, 5, 3])
    found = seen(Packs(), (x, lengths))["rnn"]
    for row, length in enumerate(lengths.tolist()):
        part = x[row, :length]
        torch.testing.assert_close(found[row], torch.cat([part.mean(0), part.std(0, correction=0)]))


@pytest.mark.parametrize("name", ["attention_mask", "src_key_padding_mask"])
def test_masks_are_found_by_name(name):
    class Net(nn.Module):
        if name == "attention_mask":

            def forward(self, x, attention_mask=None): ...
        else:

            def forward(self, x, src_key_padding_mask=None): ...

    kept = torch.tensor([[1, 1], [1, 0]]).bool()
    given = kept.long() if name == "attention_mask" else ~kept
    assert torch.equal(padding(Net(), ((torch.zeros(2, 2, 3), given), {})), kept)
    assert torch.equal(padding(Net(), ((torch.zeros(2, 2, 3),), {name: given})), kept)
    assert padding(Net(), ((torch.zeros(2, 2, 3),), {})) is None


@pytest.mark.parametrize(("net", "shape"), [(cases.Windows(), (2, 6)), (cases.TimeFirst(), (3, 4))])
def test_windows_and_steps_before_the_batch_are_seen_by_row(net, shape):
    """A row alone is seen as it is in a batch, of another length than there are steps or of the same."""
    x = torch.randn(200, *shape, generator=torch.Generator().manual_seed(0))
    model = ibnn.convert(net, components=2, seed=0)
    ibnn.fit_novelty(model, x)
    whole = measure(model, x[:12]).p_value
    for size in (1, 3, 4):
        parts = torch.cat([measure(model, part).p_value for part in x[:12].split(size)])
        torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize(("width", "narrow"), [(300, 256), (600, 256), (12, 6), (7, 3)])
def test_wide_summaries_are_added_up_in_groups_of_nearly_equal_size(width, narrow):
    """By a dense matrix of one sign a row."""
    word = words(address(0, Space.PROJECTION, 3, torch.arange(width)))
    matrix = torch.zeros(width, narrow)
    matrix[torch.arange(width), word.argsort() % narrow] = (word % 2 * 2 - 1).float()
    widths = torch.tensor([[width, narrow]])
    one = Reference(layers=torch.tensor([3]), widths=widths, shift=torch.zeros(width), scale=torch.ones(width))
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(one.reduce(0, x), x @ matrix)
    assert matrix.abs().sum(0).max() - matrix.abs().sum(0).min() <= 1
