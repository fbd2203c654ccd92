"""Recurrent layers against a slow reference: one row and one step at a time, in float64."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import captured, close, converted, give
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import ibnn
from ibnn.draws import Draw
from ibnn.network import folded

B, T, D, H = 4, 5, 3, 4
LENGTHS = {"unsorted": [3, 5, 1, 4], "sorted": [5, 4, 2, 2]}


def cell(layer: nn.Module, weights: dict[str, Tensor], z: dict[str, Tensor], x: Tensor, h: Tensor, c: Tensor) -> Any:
    """One step of one row, from torch's documentation; z by the name of the weight whose input it multiplies."""
    zero = torch.zeros(()).double()
    i = weights["weight_ih"] @ (x * z["weight_ih"]) + weights.get("bias_ih", zero)
    s = weights["weight_hh"] @ (h * z["weight_hh"]) + weights.get("bias_hh", zero)
    if isinstance(layer, nn.GRU | nn.GRUCell):
        (i_r, i_z, i_n), (s_r, s_z, s_n) = i.view(3, -1), s.view(3, -1)
        gate, n = torch.sigmoid(i_z + s_z), torch.tanh(i_n + torch.sigmoid(i_r + s_r) * s_n)
        return (1 - gate) * n + gate * h, c
    if isinstance(layer, nn.LSTM | nn.LSTMCell):
        a, f, g, o = (i + s).view(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(a) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (weights["weight_hr"] @ (h * z["weight_hr"]) if "weight_hr" in weights else h), c
    return (torch.tanh if layer.nonlinearity == "tanh" else torch.relu)(i + s), c


def recur(layer: nn.RNNBase, z: Tensor, x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (T, ·) of one row, its last h and c, (L · directions, ·) each; z (D,) in the order of the weights."""
    names = [name for name, _ in layer.named_parameters() if name.startswith("weight")]
    parts = dict(zip(names, z.split([getattr(layer, name).shape[1] for name in names]), strict=True))
    hs, cs = [], []
    for number in range(layer.num_layers):
        sides = []
        for reverse in ("", "_reverse")[: 1 + layer.bidirectional]:
            end = f"_l{number}{reverse}"
            own = {n.removesuffix(end): p for n, p in layer.named_parameters() if n.endswith(end)}
            mine = {n.removesuffix(end): part for n, part in parts.items() if n.endswith(end)}
            h, c, outputs = h0[len(hs)], c0[len(hs)], {}
            for t in reversed(range(len(x))) if reverse else range(len(x)):
                h, c = cell(layer, own, mine, x[t], h, c)
                outputs[t] = h
            sides.append(torch.stack([outputs[t] for t in range(len(x))]))
            hs.append(h)
            cs.append(c)
        x = torch.cat(sides, -1)
    return x, torch.stack(hs), torch.stack(cs)


class Recurs(nn.Module):
    """A recurrent layer between tensors with the batch first: (output, last states), flat, a row each."""

    def __init__(self, kind: str, *, packed: bool = False, initial: bool = False, **options: Any) -> None:
        super().__init__()
        self.packed, self.initial = packed, initial
        self.layer = getattr(nn, kind)(D, H, **options)
        for parameter in self.layer.parameters():
            nn.init.normal_(parameter, std=0.7)

    def forward(self, x: Tensor, lengths: Tensor, h0: Tensor, c0: Tensor) -> Tensor:
        layer = self.layer
        hx = None
        if self.initial:  # given with the batch first
            h0, c0 = h0.transpose(0, 1).contiguous(), c0.transpose(0, 1).contiguous()
            hx = (h0, c0) if isinstance(layer, nn.LSTM) else h0
        inside = x if layer.batch_first else x.transpose(0, 1)
        if self.packed:
            is_sorted = bool((lengths.diff() <= 0).all())
            inside = pack_padded_sequence(inside, lengths, layer.batch_first, enforce_sorted=is_sorted)
        output, state = layer(inside, hx)
        if self.packed:
            output, found = pad_packed_sequence(output, layer.batch_first, total_length=T)
            assert found.tolist() == lengths.tolist()
        output = output if layer.batch_first else output.transpose(0, 1)
        states = [part.transpose(0, 1).flatten(1) for part in (state if isinstance(state, tuple) else (state,))]
        return torch.cat([output.flatten(1), *states], 1)


CASES: dict[str, dict[str, Any]] = {
    "RNN": {"kind": "RNN"},
    "RNN, relu, no bias": {"kind": "RNN", "nonlinearity": "relu", "bias": False, "batch_first": True},
    "GRU": {"kind": "GRU", "batch_first": True},
    "GRU, deep both ways": {"kind": "GRU", "num_layers": 2, "bidirectional": True, "initial": True},
    "GRU, packed": {"kind": "GRU", "num_layers": 2, "bidirectional": True, "packed": True, "initial": True},
    "LSTM": {"kind": "LSTM"},
    "LSTM, deep both ways": {
        "kind": "LSTM", "num_layers": 2, "bidirectional": True, "batch_first": True, "initial": True,
    },
    "LSTM, packed": {"kind": "LSTM", "bidirectional": True, "packed": True, "batch_first": True},
    "LSTM, packed, deep": {"kind": "LSTM", "num_layers": 2, "packed": True, "initial": True},
}  # fmt: skip


class Case:
    """A network, a batch for it, and the slow reference."""

    def __init__(self, name: str, lengths: str) -> None:
        torch.manual_seed(0)
        self.net = Recurs(**CASES[name]).double().eval()
        layer = self.net.layer
        count = layer.num_layers * (1 + layer.bidirectional)
        steps = torch.tensor(LENGTHS[lengths] if self.net.packed else [T] * B)
        x, h, c = (torch.randn(B, n, size, dtype=torch.float64) for n, size in ((T, D), (count, H), (count, H)))
        self.inputs = (x, steps, *((h, c) if self.net.initial else (torch.zeros_like(h), torch.zeros_like(c))))

    def reference(self, z: Tensor) -> Tensor:
        rows = []
        for x, n, h0, c0, row in zip(*self.inputs, z.expand(B, -1), strict=True):
            output, h, c = recur(self.net.layer, row, x[: int(n)], h0, c0)
            output = torch.cat([output, output.new_zeros(T - int(n), output.shape[1])])
            states = (h, c) if isinstance(self.net.layer, nn.LSTM) else (h,)
            rows.append(torch.cat([output.flatten(), *(part.flatten() for part in states)]))
        return torch.stack(rows)


@pytest.fixture(
    params=[(name, lengths) for name in CASES for lengths in LENGTHS if lengths != "sorted" or "pack" in name]
)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def test_every_row_has_its_own_z_at_all_steps(case: Case) -> None:
    net, inputs = case.net, case.inputs
    model = converted(net, copy=False).train()
    assert model.latents["layer"].nodes == sum(p.shape[1] for p in net.layer.parameters(recurse=False) if p.dim() == 2)
    with torch.no_grad():
        assert close(net(*inputs), case.reference(torch.ones(model.nodes).double()))
    model(*inputs)
    with captured(model) as met:
        output = model(*inputs)
    z = met["layer"][0].clone().requires_grad_()
    assert len(z.unique()) == z.numel()
    assert close(output, case.reference(z))
    weights = list(net.layer.parameters(recurse=False))
    expected = torch.autograd.grad(case.reference(z).square().sum(), [z, *weights])
    found = torch.autograd.grad(output.square().sum(), [net.layer.latent.mean, *weights])
    assert expected[0].ne(0).any(0).all()
    assert close(found[0].sum(0), expected[0].sum(0))  # every row of z belongs to one component
    assert all(close(a, b) for a, b in zip(found[1:], expected[1:], strict=True))


def test_draws_are_exact(case: Case) -> None:
    net, inputs = case.net, case.inputs
    model = converted(net)
    z = model.draw_latents(2, 0).z
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            rows = model.draw_logits(inputs, samples=2)
            for j, row in enumerate(rows):
                assert close(row, case.reference(z[j]))
                assert close(row, model.draw(component=j // 2, index=j % 2)(*inputs))
    with torch.no_grad():
        assert close(model.draw_logits(inputs, samples=2, batch_size=512), rows)  # draws as rows
        model.set_posterior(mean=1.0, std=0.0)
        assert close(model.draw_logits(inputs, samples=1)[0], net(*inputs))
    drawn = model.draw(component=0)
    assert list(drawn.state_dict()) == list(net.state_dict())
    assert "forward" not in vars(drawn.layer)


def test_weights_replaced_since_are_the_ones_that_count(case: Case) -> None:
    """The layer keeps a list of its weights, which a replaced parameter makes stale."""
    net, inputs = case.net, case.inputs
    model = converted(net, copy=False)
    for name in net.layer._flat_weights_names:
        setattr(net.layer, name, nn.Parameter(getattr(net.layer, name).detach() * 1.5))
    model.load_state_dict({n: t * 1.1 for n, t in model.state_dict().items()}, assign=True, strict=False)
    z = model.draw_latents(1, 0).z
    with torch.no_grad():
        assert close(model.draw_logits(inputs, samples=1)[1], case.reference(z[1]))
        assert close(model.draw_logits(inputs, samples=1)[1], case.reference(z[1]))
        model.set_posterior(mean=1.0, std=0.0)
        assert close(net(*inputs), case.reference(torch.ones(model.nodes).double()))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("name", ["GRU, packed", "LSTM, deep both ways"])
def test_copies_and_files(name: str, how: str, tmp_path: Any) -> None:
    case = Case(name, "unsorted")
    model, inputs = converted(case.net).eval(), case.inputs
    if how == "save":
        model.save_pretrained(tmp_path, latents_only=True)
        again = ibnn.load(tmp_path, copy.deepcopy(case.net))
    else:
        again = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.equal(again(*inputs), model(*inputs))
        again.set_posterior(mean=1.0, std=0.0)  # of its own latents alone
        assert not torch.allclose(again(*inputs), model(*inputs))
    reverted = ibnn.revert(again).eval()
    assert list(reverted.state_dict()) == list(case.net.state_dict())
    assert torch.equal(reverted(*inputs), case.net(*inputs))


def test_dropout_between_layers() -> None:
    """As many values are dropped, on average, as in torch's own kernel; the last layer's output is whole."""
    torch.manual_seed(0)
    layer = nn.GRU(D, 64, num_layers=2, dropout=0.4, batch_first=True)
    model, x = converted(nn.Sequential(layer), copy=False, logits="0").train(), torch.randn(256, T, D)
    model.set_posterior(mean=1.0, std=0.0)
    z = torch.ones(256, model.nodes)
    means = []
    for run in (lambda: layer(x)[0], lambda: model.outputs(x, z[None])[0]):
        outputs = torch.stack([run() for _ in range(20)])
        assert (outputs[0] != outputs[1]).any()
        means.append((outputs.mean(), outputs.std(0).mean()))
    torch.testing.assert_close(means[0], means[1], rtol=0.02, atol=0.002)
    layer.eval()
    assert torch.allclose(model.outputs(x, z[None])[0], layer(x)[0], atol=1e-6)


@pytest.mark.parametrize("kind", ["RNNCell", "LSTMCell", "GRUCell"])
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_cells(kind: str, initial: bool, bias: bool) -> None:
    torch.manual_seed(0)
    layer = getattr(nn, kind)(D, H, bias=bias).double()
    x, h, c = torch.randn(B, D).double(), torch.randn(B, H).double(), torch.randn(B, H).double()
    if not initial:
        h, c = torch.zeros_like(h), torch.zeros_like(c)
    hx = None if not initial else (h, c) if kind == "LSTMCell" else h
    model = converted(nn.Sequential(layer), copy=False)
    weights = {name: p for name, p in layer.named_parameters() if "latent" not in name}

    def reference(z: Tensor) -> list[Tensor]:
        parts = [dict(zip(("weight_ih", "weight_hh"), row.split([D, H]), strict=True)) for row in z.expand(B, -1)]
        steps = [cell(layer, weights, parts[b], x[b], h[b], c[b]) for b in range(B)]
        return [torch.stack(part) for part in zip(*steps, strict=True)][: 1 + (kind == "LSTMCell")]

    for z in (None, torch.rand(D + H).double(), torch.rand(B, D + H).double()):
        ones = torch.ones(D + H).double()
        give(model.latents["0"], z)
        found = layer(x, hx)
        expected = reference(ones if z is None else z)
        for a, b in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
            assert close(a, b)
    give(model.latents["0"], None)
    half = folded(model, Draw(torch.full((D + H,), 0.5).double()))[0]
    found = half(x, hx)
    assert close(found[0] if isinstance(found, tuple) else found, reference(torch.full((D + H,), 0.5).double())[0])


class Cells(nn.Module):
    """A cell in a loop of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(D, H), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = None
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.head(h)


def test_a_cell_in_a_loop_trains_and_predicts() -> None:
    net, x = Cells().double(), torch.randn(B, T, D).double()
    model = converted(net, likelihood="categorical")
    model.train().elbo(x, torch.arange(B) % 2, n_data=B).loss.backward()
    assert all(latent.mean.grad.ne(0).all() for latent in model.latents.values())
    expected = torch.stack([model.draw(k, s)(x) for k in range(3) for s in range(2)])
    assert close(model.draw_logits(x, samples=2), expected)
    assert close(model.draw_logits(x, samples=2, batch_size=99), expected)


def test_an_lstm_that_projects_its_state_gets_no_latent() -> None:
    plan = ibnn.plan(nn.ModuleDict({"lstm": nn.LSTM(D, H, proj_size=2), "head": nn.Linear(2, 2)}))
    assert [layer.name for layer in plan.layers] == ["head"]
    assert "proj_size" in plan.skipped[0].reason


def test_rows_that_fold_several_sequences_share_their_z() -> None:
    class Folds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(D, H, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:  # (B, sentences, T, D)
            return self.gru(x.flatten(0, 1))[0][:, -1].unflatten(0, x.shape[:2]).sum(1)

    model, x = converted(Folds().double()).train(), torch.randn(B, 2, T, D).double()
    model(x)
    with captured(model) as met:
        output = model(x)
    rows = [folded(model, Draw(z))(x[b : b + 1]) for b, z in enumerate(met["gru"][0])]
    assert close(output, torch.cat(rows))


def test_a_batch_read_as_time_is_refused() -> None:
    net = nn.Sequential(nn.LSTM(D, H))  # without batch_first
    net.forward = lambda x: net[0](x)[0][:, -1]
    model = converted(net, copy=False).train()
    with pytest.raises(ValueError, match=r"input of layer '0'.*a dimension 1 .*exclude=\['0'\]"):
        model(torch.randn(B, T, D))


def test_an_input_that_is_packed_already_is_refused() -> None:
    net = nn.Sequential(nn.LSTM(D, H))
    net.forward = lambda x: net[0](x)[0].data
    packed = pack_padded_sequence(torch.randn(T, B, D), torch.tensor([5, 4, 2, 2]))
    assert isinstance(packed, PackedSequence)
    with pytest.raises(TypeError, match="padded"):
        converted(net, copy=False).train()(packed)


def test_computed_weights_are_read_as_they_are() -> None:
    layer = nn.GRUCell(D, H).double()
    net = nn.Sequential(parametrizations.weight_norm(layer, "weight_hh"))
    model, x, h = converted(net, copy=False), torch.randn(B, D).double(), torch.randn(B, H).double()
    weights = {name: getattr(layer, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    z = torch.rand(D + H).double()
    parts = dict(zip(("weight_ih", "weight_hh"), z.split([D, H]), strict=True))
    expected = torch.stack([cell(layer, weights, parts, x[b], h[b], h[b])[0] for b in range(B)])
    give(model.latents["0"], z)
    assert close(layer(x, h), expected)
    give(model.latents["0"], None)
    assert close(folded(model, Draw(z))[0](x, h), expected)


TYPES: dict[str, Callable[[], nn.Module]] = {
    "bilinear": lambda: nn.Bilinear(3, 4, 2),
    "no bias": lambda: nn.Bilinear(3, 4, 2, bias=False),
}


@pytest.mark.parametrize("name", TYPES)
def test_bilinear_multiplies_both_inputs(name: str) -> None:
    layer = TYPES[name]().double()
    model, a, b = converted(layer).train(), torch.randn(B, 3).double(), torch.randn(B, 4).double()
    assert model.nodes == 7
    model(a, b)
    with captured(model) as met:
        output = model(a, b)
    z = met[""][0]
    expected = torch.einsum("oij,bi,bj->bo", layer.weight, a * z[:, :3], b * z[:, 3:])
    assert close(output, expected + (0 if layer.bias is None else layer.bias))
    assert close(model.draw_logits((a, b), samples=1)[1], model.draw(1)(a, b))
    drawn = model.draw_latents(1, 0).z[1]
    expected = torch.einsum("oij,bi,bj->bo", layer.weight, a * drawn[:3], b * drawn[3:])
    assert close(model.draw(1)(a, b), expected + (0 if layer.bias is None else layer.bias))


class Tied(nn.Module):
    """Words to words, with one weight for both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(words))).mean(1))


def test_embeddings_get_a_latent_when_asked_for(tmp_path: Any) -> None:
    net, words = Tied().double(), torch.randint(7, (B, T))
    (skipped,) = ibnn.plan(net).skipped
    assert (skipped.name, skipped.reason.split(":")[0]) == ("embedding", "looks rows up")
    assert list(converted(net, include=[nn.Module]).latents) == ["middle", "head"]
    assert list(converted(net, include=["embedding"]).latents) == ["embedding"]
    with pytest.raises(ValueError, match="patterns that match"):
        ibnn.plan(net, include=["emb*"])  # not by a pattern: it might mean what is beside
    model = converted(net, include=[nn.Module, nn.Embedding], likelihood="categorical").train()
    assert list(model.latents) == ["embedding", "middle", "head"]
    model(words)
    with captured(model) as met:
        output = model(words)
    z = {name: calls[0] for name, calls in met.items()}
    hidden = net.embedding.weight[words] * z["embedding"][:, None]
    hidden = torch.tanh((hidden * z["middle"][:, None]) @ net.middle.weight.T + net.middle.bias).mean(1)
    assert close(output, (hidden * z["head"]) @ net.embedding.weight.T)
    output.sum().backward()
    assert all(latent.mean.grad.ne(0).any() for latent in model.latents.values())
    assert model.net.head.weight is model.net.embedding.weight
    model.eval().save_pretrained(tmp_path)
    again = ibnn.load(tmp_path, Tied().double()).eval()
    assert torch.equal(again(words), model(words))
    assert again.net.head.weight is again.net.embedding.weight
    for k, row in enumerate(model.draw_logits(words, samples=1)):
        assert close(row, model.draw(k)(words))  # where the tie has ended
    assert "max_norm" in ibnn.plan(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0), nn.Linear(2, 2))).skipped[0].reason
