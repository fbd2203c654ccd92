"""Offers plain modules that know nothing of ibnn, for experiments, benchmarks and tests; a file per family."""

from ibnn.nets.convnets import VGG16, LeNet
from ibnn.nets.dense import mlp
from ibnn.nets.registry import input_shape, make, names
from ibnn.nets.resnet import CifarResNet, ResNet, WideResNet

__all__ = ["mlp", "LeNet", "VGG16", "ResNet", "CifarResNet", "WideResNet"]  # families
__all__ += ["input_shape", "make", "names"]  # by name
