"""Channels: found in networks of all forms, and cut without a trace where they are zero."""

import pytest
import torch
from prunable import CUTTABLE, UNCUTTABLE, Joined, Mobile, Padded, Residual, Uncuttable, X, model_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ibnn
from ibnn.nets import CifarResNet, LeNet
from ibnn.pruning.channels import find_channels
from ibnn.pruning.cutting import costs, size, why_whole, without


@pytest.mark.parametrize("form", CUTTABLE)
def test_zero_channels_can_be_cut_without_a_trace(form: str) -> None:
    torch.manual_seed(0)
    model = model_of(CUTTABLE[form]())
    channels = find_channels(model.net, X)
    gone = set(channels.cuttable[::3])
    with torch.no_grad():
        for layer in channels.layers.values():
            for place, channel in enumerate(layer.outs.tolist()):
                if channel in gone:
                    layer.module.weight[place].zero_()
                    layer.module.bias is None or layer.module.bias[place].zero_()
        for name, ids in channels.norms.items():
            norm = model.net.get_submodule(name)
            for place, channel in enumerate(ids.tolist()):
                if channel in gone:
                    norm.weight[place] = norm.bias[place] = 0
        thin = without(model, channels, gone)
        assert len(gone) > 2
        assert sum(p.numel() for p in thin.parameters()) < sum(p.numel() for p in model.parameters())
        torch.testing.assert_close(thin.net(X), model.net(X), rtol=0, atol=1e-6)


def test_which_channels_are_one() -> None:
    residual = find_channels(Residual(), X)
    first, inner, outer, head = (residual.layers[name] for name in ("first", "inner", "outer", "head"))
    assert first.outs.tolist() == outer.outs.tolist() == inner.ins.tolist() == residual.norms["norm"].tolist()
    assert head.ins.tolist() == first.outs.repeat_interleave(4).tolist()  # four places of each
    assert outer.ins.tolist() == inner.outs.tolist()
    mobile = find_channels(Mobile(), X)
    ids = mobile.layers["first"].outs.tolist()
    assert mobile.layers["depth"].outs.tolist() == mobile.layers["excite"].outs.tolist() == ids
    assert mobile.layers["head"].ins.tolist() == 16 * ids  # places first
    joined = find_channels(Joined(), X)
    both = joined.layers["left"].outs.tolist() + joined.layers["right"].outs.tolist()
    assert joined.layers["twice"].ins.tolist() == joined.layers["twice"].outs.tolist() == both


def test_channels_that_zeros_are_added_to_stay() -> None:
    torch.manual_seed(0)
    model = model_of(Padded())
    wide = find_channels(model.net, X).layers["wide"].outs.tolist()
    assert find_channels(model.net, X).layers["first"].outs.tolist() == wide[2:8]
    found = ibnn.prune(model, (X, torch.tensor([0, 1, 2, 0])), keep=0.5)
    first, second, _ = found.layers
    assert first.outputs[1] < 6
    assert second.outputs[1] == first.outputs[1] + 4


@pytest.mark.parametrize("way", UNCUTTABLE)
def test_what_mixes_nodes_is_refused_by_name(way: str) -> None:
    model, y = model_of(Uncuttable(way)), torch.tensor([0, 1, 2, 0])
    with pytest.raises(ValueError, match=r"Expected `keep` to be enough .* made \(") as caught:
        ibnn.prune(model, (X, y), keep=0.05)
    assert UNCUTTABLE[way] in str(caught.value)


def test_multiply_adds_and_weights_equal_those_counted_by_hand() -> None:
    net = LeNet()
    found = size(ibnn.convert(net), find_channels(net, torch.zeros(2, 1, 28, 28)))
    convolutions = 24 * 24 * 6 * 25 + 8 * 8 * 16 * 6 * 25 + 120 * 16 * 16
    assert found == (41_806, convolutions + 120 * 64 + 64 * 10, 207)
    one = costs(find_channels(net, torch.zeros(2, 1, 28, 28)))
    assert next(iter(one.values())) == 24 * 24 * 25 + 8 * 8 * 16 * 25  # a channel of conv1: made, and taken by conv2
    assert list(one.values())[-1] == 120 + 10  # a node of fc2


@pytest.mark.parametrize(
    "net", [*(make() for make in CUTTABLE.values()), Uncuttable("tied"), CifarResNet(depth=8, width=0.5)]
)
def test_multiply_adds_equal_those_that_torch_counts(net: nn.Module) -> None:
    x = torch.zeros(2, 3, 32, 32) if isinstance(net, CifarResNet) else X
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(x)
    products = sum(layer.products for layer in find_channels(net, x).layers.values())
    assert products == counter.get_total_flops() // 2 // len(x)


def test_the_output_and_what_a_layer_without_latents_takes_stay() -> None:
    net = Residual()
    channels = find_channels(net, X)
    assert why_whole(channels, channels.layers["head"]) == "is the network's output"
    model = ibnn.convert(net, exclude="outer")
    found = ibnn.prune(model, (X, torch.tensor([0, 1, 2, 0])), keep=0.7)
    outputs = {layer.name: layer.outputs for layer in found.layers}
    assert outputs["inner"] == (6, 6)
    assert outputs["first"][1] < 8
