"""Attention against a slow reference: one row, one head and one pair of tokens at a time, in float64."""

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from reference import captured, close, converted, give
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ibnn
from ibnn.draws import Draw
from ibnn.layers.registry import layer_type
from ibnn.network import folded, no_fast_path

B, L, S, E, H = 3, 4, 5, 6, 2
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def attend(layer: nn.MultiheadAttention, z: Tensor, query: Tensor, key: Tensor, value: Tensor, banned: Tensor) -> Any:
    """Output (L, E) and weights (H, L, S') of one row; z (D,) in the order query, key, value, output."""
    z_q, z_k, z_v, z_o = z.split([E, layer.kdim, layer.vdim, E])
    if layer.in_proj_weight is None:
        weights = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
    else:
        weights = layer.in_proj_weight.chunk(3)
    biases = torch.zeros(3, E).double() if layer.in_proj_bias is None else layer.in_proj_bias.view(3, E)
    q = (query * z_q) @ weights[0].T + biases[0]
    k = (key * z_k) @ weights[1].T + biases[1]
    v = (value * z_v) @ weights[2].T + biases[2]
    heads, attention, width = [], [], E // H
    for h in range(H):
        part = slice(h * width, (h + 1) * width)
        for i in range(len(q)):
            scores = torch.stack([q[i, part] @ k[j, part] / math.sqrt(width) for j in range(len(k))])
            attention.append(scores.masked_fill(banned[i], -math.inf).softmax(0))
            heads.append(attention[-1] @ v[:, part])
    concatenated = torch.stack(heads).view(H, len(q), width).transpose(0, 1).flatten(1)
    bias = 0 if layer.out_proj.bias is None else layer.out_proj.bias
    return (concatenated * z_o) @ layer.out_proj.weight.T + bias, torch.stack(attention)


class Attends(nn.Module):
    """Takes query, key, value with the batch first; returns output and weights as one tensor."""

    def __init__(self, batch_first: bool = True, call: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, batch_first=batch_first, **options)
        self.call = {"average_attn_weights": False} | (call or {})
        for parameter in self.attention.parameters():
            nn.init.normal_(parameter, std=0.7)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        first = self.attention.batch_first
        inputs = (q, k, v) if first else (x.transpose(0, 1) for x in (q, k, v))
        output, weights = self.attention(*inputs, key_padding_mask=padding, **self.call)
        output = output if first else output.transpose(0, 1)
        return output if weights is None else torch.cat([output.flatten(1), weights.flatten(1)], 1)


CAUSAL = torch.ones(L, S, dtype=torch.bool).triu(1)
CASES: dict[str, Callable[[], nn.Module]] = {
    "packed": Attends,
    "sequence first": lambda: Attends(batch_first=False),
    "without biases": lambda: Attends(bias=False),
    "separate": lambda: Attends(kdim=4, vdim=7),
    "separate, sequence first": lambda: Attends(batch_first=False, kdim=4, vdim=7, bias=False),
    "mask": lambda: Attends(call={"attn_mask": CAUSAL}),
    "float mask": lambda: Attends(batch_first=False, call={"attn_mask": CAUSAL.double() * -1e300}),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    net = CASES[request.param]().double().eval()
    sizes = ((L, E), (S, net.attention.kdim), (S, net.attention.vdim))
    inputs = tuple(torch.randn(B, *size, dtype=torch.float64) for size in sizes)
    banned = CAUSAL if "attn_mask" in net.call else torch.zeros(L, S, dtype=torch.bool)

    def reference(z: Tensor) -> Tensor:
        """The rows' outputs and weights from the slow reference, for z (D,) or (B, D)."""
        z = z.expand(B, -1)
        rows = [attend(net.attention, z[b], *(x[b] for x in inputs), banned) for b in range(B)]
        return torch.stack([torch.cat([output.flatten(), weights.flatten()]) for output, weights in rows])

    return net, inputs, reference


def test_every_row_attends_with_its_own_z(case: Any) -> None:
    net, inputs, reference = case
    with torch.no_grad():
        assert close(net(*inputs), reference(torch.ones(layer_type(net.attention).nodes(net.attention))))
    model = converted(net).train()
    output = model(*inputs)
    with captured(model) as met:
        output = model(*inputs)
    (z,) = met["attention"]
    assert z.shape == (B, 2 * E + net.attention.kdim + net.attention.vdim)
    assert len(z.unique()) == z.numel()
    assert close(output, reference(z))


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_attention_with_added_keys_gets_no_latent(option: str) -> None:
    plan = ibnn.plan(nn.ModuleDict({"attends": nn.MultiheadAttention(E, H, **{option: True}), "head": nn.Linear(E, 2)}))
    assert [layer.name for layer in plan.layers] == ["head"]
    assert option in plan.skipped[0].reason


def test_draws_are_exact(case: Any) -> None:
    net, inputs, reference = case
    model = converted(net)
    with torch.no_grad():
        rows = model.draw_logits(inputs, samples=2)
        assert close(model.draw_logits(inputs, samples=2, batch_size=512), rows)  # draws as rows
        z = model.draw_latents(2, 0).z
        for j, row in enumerate(rows):
            assert close(row, reference(z[j]))
            assert close(row, model.draw(component=j // 2, index=j % 2)(*inputs))
    drawn = model.draw(component=0)
    assert list(drawn.state_dict()) == list(net.state_dict())
    assert "forward" not in vars(drawn.attention)
    assert not drawn.attention._forward_hooks


def test_gradients_are_those_of_the_reference(case: Any) -> None:
    net, inputs, reference = case
    model = converted(net, copy=False).train()
    model(*inputs)
    with captured(model) as met:
        output = model(*inputs)
    latent, weights = net.attention.latent, [p for n, p in net.named_parameters() if "latent" not in n]
    z = met["attention"][0].clone().requires_grad_()
    expected = torch.autograd.grad(reference(z).square().sum(), [z, *weights])
    found = torch.autograd.grad(output.square().sum(), [latent.mean, *weights])
    assert close(found[0].sum(0), expected[0].sum(0))  # every row of z belongs to one component
    assert all(close(a, b) for a, b in zip(found[1:], expected[1:], strict=True))


def test_padding_and_keywords_and_flags_pass_through() -> None:
    padding = torch.arange(S).expand(B, S) >= torch.tensor([[5], [3], [4]])
    inputs = tuple(torch.randn(B, n, E, dtype=torch.float64) for n in (L, S, S))
    for call in ({}, {"need_weights": False}, {"average_attn_weights": True}):
        net = Attends(call=call).double().eval()
        model = converted(net)
        with torch.no_grad():
            rows = model.draw_logits((*inputs, padding), samples=1)
            together = model.draw_logits((*inputs, padding), samples=1, batch_size=64)
            for k in range(len(rows)):
                assert close(rows[k], model.draw(component=k)(*inputs, padding))
                assert close(together[k], rows[k])
    layer = nn.MultiheadAttention(E, H, batch_first=True).double()
    model = converted(nn.ModuleDict({"a": layer}), copy=False)
    q, k, v = inputs
    give(model.latents["a"], torch.rand(B, 4 * E, dtype=torch.float64))
    positional = layer(q, k, v, None, False)
    keyword = layer(value=v, query=q, key=k, need_weights=False)
    assert torch.equal(positional[0], keyword[0])
    assert positional[1] is keyword[1] is None


def test_dropout_is_the_layers_own() -> None:
    layer, x = Attends(dropout=0.5).double(), torch.randn(B, L, E, dtype=torch.float64)
    model = converted(layer).train()
    model.set_posterior(mean=1.0, std=0.0)
    torch.manual_seed(0)
    found = model(x, x, x)
    torch.manual_seed(0)
    assert close(found, layer.train()(x, x, x))


def test_self_attention_multiplies_query_key_and_value_apart() -> None:
    net = Attends().double()
    model, x = converted(net), torch.randn(B, L, E, dtype=torch.float64)
    banned = torch.zeros(L, L, dtype=torch.bool)
    for z in (torch.rand(4 * E, dtype=torch.float64), torch.rand(B, 4 * E, dtype=torch.float64)):
        with torch.no_grad():
            found = model.outputs((x, x, x), z[None])[0]
        rows = [attend(net.attention, z.expand(B, -1)[b], x[b], x[b], x[b], banned) for b in range(B)]
        assert close(found, torch.stack([torch.cat([o.flatten(), w.flatten()]) for o, w in rows]))


# --- Transformers ---------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Encoder, decoder and a head; batch first outside, whatever is inside."""

    def __init__(self, batch_first: bool, norm_first: bool = False) -> None:
        super().__init__()
        self.first = batch_first
        options = {"batch_first": batch_first, "norm_first": norm_first, "dropout": 0.0}
        encoder = nn.TransformerEncoderLayer(E, H, 8, **options)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=batch_first and not norm_first)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 8, **options), 1)
        self.head = nn.Linear(E, 3)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor | None = None) -> Tensor:
        if not self.first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=source.dtype)
        memory = self.encoder(source, src_key_padding_mask=padding)
        output = self.decoder(target, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)
        return self.head(output if self.first else output.transpose(0, 1)).mean(1)


@pytest.fixture(params=[(True, False), (False, False), (True, True)], ids=["first", "second", "norm first"])
def transformer(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    net = Transformer(*request.param).double().eval()
    padding = torch.arange(S).expand(B, S) >= torch.tensor([[5], [3], [4]])
    return net, (torch.randn(B, S, E).double(), torch.randn(B, L, E).double(), padding)


def test_a_transformer_is_one_row_at_a_time_the_network_of_that_rows_z(transformer: Any) -> None:
    """The training forward against plain folded networks, which owe nothing to what runs a z for each row."""
    net, inputs = transformer
    model = converted(net).train()
    assert list(model.latents) == [
        *(f"encoder.layers.{n}.{part}" for n in (0, 1) for part in ("self_attn", "linear1", "linear2")),
        *(f"decoder.layers.0.{part}" for part in ("self_attn", "multihead_attn", "linear1", "linear2")),
        "head",
    ]
    model(*inputs)
    with captured(model) as met:
        output = model(*inputs)
    z = torch.cat([calls[0] for calls in met.values()], 1)
    with no_fast_path():
        rows = [folded(model, Draw(z[b]))(*(x[b : b + 1] for x in inputs)) for b in range(B)]
    assert close(output, torch.cat(rows))
    output.square().sum().backward()
    assert all(latent.mean.grad is not None and latent.mean.grad.ne(0).any() for latent in model.latents.values())
    assert all(latent.rho.grad is not None for latent in model.latents.values())


@pytest.mark.parametrize("grad", [True, False])
def test_the_fast_path_never_loses_a_latent(transformer: Any, grad: bool) -> None:
    net, inputs = transformer
    for include in (None, nn.MultiheadAttention, nn.Linear):
        model = converted(net, include=include)
        with torch.set_grad_enabled(grad):
            rows = model.draw_logits(inputs, samples=1)
            plain = net(*inputs)
            for k, row in enumerate(rows):
                assert torch.allclose(row, model.draw(component=k)(*inputs), rtol=1e-9, atol=1e-9)
                assert (row - plain).abs().max() > 1e-3
    model.set_posterior(mean=1.0, std=0.0)
    with torch.no_grad():
        assert torch.allclose(model.draw_logits(inputs, samples=1)[0], plain, rtol=1e-9)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_fast_path_stays_off_until_the_last_of_overlapping_blocks_ends() -> None:
    first, second = no_fast_path(), no_fast_path()  # as of two models in two threads
    found = []
    for step in (first.__enter__, second.__enter__, lambda: first.__exit__(None, None, None)):
        step()
        found.append(torch.backends.mha.get_fastpath_enabled())
    second.__exit__(None, None, None)
    assert found == [False, False, False]
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_and_files(transformer: Any, how: str, tmp_path: Any) -> None:
    net, inputs = transformer
    model = converted(net, kl="pairwise").eval()
    if how == "save":
        model.save_pretrained(tmp_path)
        again = ibnn.load(tmp_path, copy.deepcopy(net))
    else:
        again = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.equal(again(*inputs), model(*inputs))
        again.set_posterior(mean=1.0, std=0.0)  # of its own latents alone
        assert not torch.allclose(again(*inputs), model(*inputs))
    assert torch.equal(again.train()(*inputs), again(*inputs))  # forward runs the copy's own layers
    reverted = ibnn.revert(again)
    assert list(reverted.state_dict()) == list(net.state_dict())
    assert all("forward" not in vars(module) for module in reverted.modules())
    assert close(reverted.eval()(*inputs), net(*inputs))


def test_weights_keep_their_names_and_kl_counts_all_ports(transformer: Any) -> None:
    net, _ = transformer
    model = converted(net)
    kept = [name for name in model.net.state_dict() if ".latent." not in name]
    assert kept == list(net.state_dict())
    assert ibnn.plan(net).nodes == model.nodes == 4 * 4 * E + 3 * (E + 8) + E
    assert model.kl().isfinite()


def test_checkpointed_layers_find_their_z_again(transformer: Any) -> None:
    net, inputs = transformer
    model = converted(net).train()
    gradients = []
    for checkpointed in (False, True):
        again = copy.deepcopy(model)
        if checkpointed:
            for layer in again.net.encoder.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        again.elbo(inputs, torch.zeros(B, 3).double(), n_data=9).loss.backward()
        gradients.append([p.grad for p in again.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    assert all(close(a, b) for a, b in zip(*gradients, strict=True))


def test_subclasses_with_a_forward_of_their_own_are_left_alone() -> None:
    class Doubled(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output, weights = super().forward(*args, **kwargs)
            return 2 * output, weights

    net = nn.ModuleDict({"a": Doubled(E, H), "b": nn.Linear(E, 2)})
    plan = ibnn.plan(net)
    assert [entry.name for entry in plan.layers] == ["b"]
    assert plan.skipped[0].reason == "its class has a forward of its own"
    odd = nn.ModuleDict({"a": nn.MultiheadAttention(E, H), "b": nn.Linear(E, 2)})
    odd["a"].forward = lambda *args: args
    assert [entry.name for entry in ibnn.plan(odd).layers] == ["b"]


def test_a_batch_in_the_wrong_place_is_refused() -> None:
    net = Attends(batch_first=False)
    net.attention.batch_first = True  # reads the sequence as the batch
    net.forward = lambda q: net.attention(q.transpose(0, 1), q.transpose(0, 1), q.transpose(0, 1))[0].mean(0)
    model = converted(net, copy=False).train()
    with pytest.raises(ValueError, match=r"input of layer 'attention'.*a dimension 0 .*exclude=\['attention'\]"):
        model(torch.randn(B, L, E))


def test_compiled_attention_has_its_latents() -> None:
    torch._dynamo.reset()
    net = nn.TransformerEncoderLayer(E, H, 8, dropout=0.0, batch_first=True).eval()
    model, x = converted(net).eval(), torch.randn(B, L, E)
    with torch.no_grad():
        expected = model(x)
        found = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert torch.allclose(found, expected, atol=1e-5)
