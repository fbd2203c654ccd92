import pytest
import torch
from torch import nn

import ibnn
from ibnn.lab.sizes import Row, Size, count, table1
from ibnn.nets import LeNet

METHOD = {
    "LeNet": (41_806, 207),
    "AlexNet": (61_100_840, 18_307),
    "VGG16-small": (15_245_130, 5_251),
    "VGG16-large": (138_357_544, 36_995),
    "ResNet50": (25_557_032, 24_579),
    "WideResNet-28x10": (36_489_290, 9_475),
}


def test_count_by_hand() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    assert count(net) == Size(weights=112 + 8 + 34, nodes=3 + 16, ratio=154 / 19)


def test_count_does_not_need_memory() -> None:
    with torch.device("meta"):
        net = LeNet()
    assert count(net) == count(LeNet()) == (41_806, 207, 41_806 / 207)


def test_count_refuses_what_has_no_nodes() -> None:
    with pytest.raises(ValueError, match="layers to convert"):
        count(nn.ReLU())


def test_table_1_is_the_paper_s() -> None:
    rows = table1()
    assert {row.net: (row.weights, row.nodes) for row in rows} == METHOD
    assert all(row.ratio == row.weights / row.nodes for row in rows)
    assert rows[0] == Row("LeNet", 41_806, 207, 41_806 / 207, printed=23)
    assert all(row.printed == row.nodes for row in rows[1:])
    assert torch.empty(1).device.type == "cpu"  # the meta device is left again


def test_the_paper_s_lenet_counts_the_convolutions_only() -> None:
    assert ibnn.plan(LeNet(), include=nn.Conv2d).nodes == table1()[0].printed
