import pytest
import torch
from torch import nn

import ibnn
from ibnn.nets import VGG16, CifarResNet, LeNet, WideResNet, mlp


@pytest.mark.parametrize(
    ("net", "shape", "weights", "nodes"),
    [
        (LeNet(), (1, 28, 28), 41_806, 207),
        (VGG16(), (3, 32, 32), 15_245_130, 5_251),
        (WideResNet(), (3, 32, 32), 36_489_290, 9_475),
    ],
    ids=["LeNet", "VGG16", "WRN-28x10"],
)
def test_sizes_are_the_paper_s(net: nn.Module, shape: tuple[int, ...], weights: int, nodes: int) -> None:
    plan = ibnn.plan(net)
    assert plan.nodes == nodes
    assert plan.weights == weights
    small = {LeNet: LeNet, VGG16: lambda: VGG16(width=0.125), WideResNet: lambda: WideResNet(depth=10, width=1)}[
        type(net)
    ]()
    assert small(torch.randn(2, *shape)).shape == (2, 10)


def test_lenet_width_multiplies_hidden_layers() -> None:
    assert ibnn.plan(LeNet(width=2)).nodes == 413


def test_mlp_layers() -> None:
    assert [layer.nodes for layer in ibnn.plan(mlp(3, 2, hidden=5, layers=2)).layers] == [3, 5, 5]


def test_cifar_resnet_has_the_size_and_names_of_the_public_checkpoints() -> None:
    net = CifarResNet(depth=20)
    assert ibnn.plan(net).weights == 272_474
    assert {"layer1.0.conv1.weight", "layer2.0.downsample.0.weight", "layer3.2.bn2.running_var", "fc.bias"} <= set(
        net.state_dict()
    )
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 10)
