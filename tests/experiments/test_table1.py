import torch
from table1 import Row, table1
from torch import nn

import ibnn
from ibnn.nets import LeNet

METHOD = {
    "LeNet": (41_806, 207),
    "AlexNet": (61_100_840, 18_307),
    "VGG16-small": (15_245_130, 5_251),
    "VGG16-large": (138_357_544, 36_995),
    "ResNet50": (25_557_032, 24_579),
    "WideResNet-28x10": (36_489_290, 9_475),
}


def test_table_1_is_the_paper_s() -> None:
    rows = table1()
    assert {row.net: (row.weights, row.nodes) for row in rows} == METHOD
    assert rows[0] == Row("LeNet", 41_806, 207, 41_806 / 207, printed=23)
    assert all(row.printed == row.nodes for row in rows[1:])
    assert torch.empty(1).device.type == "cpu"  # the meta device is left again


def test_the_paper_s_lenet_counts_the_convolutions_only() -> None:
    assert ibnn.plan(LeNet(), include=nn.Conv2d).nodes == table1()[0].printed
