"""Threads that predict change neither what another thread trains nor what it saves or copies."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ibnn
from ibnn.baselines import SWAG, MCDropout, MeanField, Plain

X, Y = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


def make_net(norm: bool = True, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def swag(norm: bool = True) -> SWAG:
    model = SWAG(make_net(norm), rank=3)
    for step in (0.1, -0.3):  # so that draws differ
        model.collect()
        with torch.no_grad():
            model.net[0].weight += step
    model.collect()
    return model


METHODS: dict[str, Callable[..., Any]] = {
    "ibnn": lambda norm=True: ibnn.convert(make_net(norm), components=2, seed=0),
    "plain": lambda norm=True: Plain(make_net(norm)),
    "dropout": lambda norm=True: MCDropout(make_net(norm)),
    "vi": lambda norm=True: MeanField(make_net(norm), init_std=0.5),
    "swag": swag,
    "ensemble": lambda norm=True: ibnn.Ensemble([make_net(norm), make_net(norm, 1)]),
    "ensemble of vi": lambda norm=True: ibnn.Ensemble([MeanField(make_net(norm, seed)) for seed in (0, 1)]),
}


@contextmanager
def beside(work: Callable[[], object], threads: int = 1) -> Iterator[None]:
    """Repeats some work in other threads within a block; raises if it failed there."""
    ended, failed = threading.Event(), list[BaseException]()

    def repeat() -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException as error:
            failed.append(error)

    others = [threading.Thread(target=repeat) for _ in range(threads)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        ended.set()
        for other in others:
            other.join()
    assert not failed, failed


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train(model: Any, steps: int, rate: float = 0.01, once: Callable[[], object] = lambda: None) -> None:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameter_groups(rate), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        model.train().elbo(X, Y, n_data=24).loss.backward()
        model(X).square().mean().backward()
        optimizer.step()
        once()


@pytest.mark.parametrize("method", METHODS)
def test_predictions_of_other_threads_do_not_change_training(method: str) -> None:
    alone, model = METHODS[method](), METHODS[method]()
    train(alone, 40)
    modes: set[tuple[bool, bool]] = set()  # (of the training thread, in train mode)
    me = threading.get_ident()

    def note(module: nn.Module, *_: object) -> None:
        if threading.get_ident() != me or torch.is_grad_enabled():  # its search for the batch is no training
            modes.add((threading.get_ident() == me, module.training))

    for net in model.net if method.startswith("ensemble") else [model.net]:
        net[1].register_forward_hook(note)
    with beside(lambda: model.predict(X[:4], samples=2), threads=2):
        train(model, 40)
    assert modes == {(True, True), (False, False)}
    assert equal(model.state_dict(), alone.state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_training_of_another_thread_does_not_change_predictions(method: str) -> None:
    model = METHODS[method](norm=False)
    expected = [model.predict(X[:4], samples=2, seed=seed).probs for seed in range(3)]
    found: list[tuple[int, Tensor]] = []

    def predict() -> None:
        seed = len(found) % 3
        found.append((seed, model.predict(X[:4], samples=2, seed=seed).probs))

    with beside(predict, threads=2):
        train(model, 20, rate=0.0)  # the weights stay
    assert found
    assert all(torch.equal(probs, expected[seed]) for seed, probs in found)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.last = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["gru", "vi", "swag", "ensemble of vi"])
def test_copies_and_saves_while_threads_predict_have_the_right_weights(method: str, tmp_path: Path) -> None:
    x, net = (torch.randn(4, 5, 6), Recurrent()) if method == "gru" else (X[:4], make_net())
    model: Any = ibnn.convert(net, components=2, init_std=0.3, seed=0) if method == "gru" else METHODS[method]()
    model.predict(x)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = [id(parameter) for parameter in model.parameters()]
    with beside(lambda: model.predict(x, samples=3), threads=3):
        for number in range(15):
            assert equal(model.state_dict(), expected)
            assert equal(copy.deepcopy(model).state_dict(), expected)
            assert [id(parameter) for parameter in model.parameters()] == parameters
            model.load_state_dict(expected)
            model.save_pretrained(tmp_path / str(number))
    saved = {(path / "model.safetensors").read_bytes() for path in tmp_path.iterdir()}
    configs = {(path / "config.json").read_bytes() for path in tmp_path.iterdir()}
    assert (len(saved), len(configs)) == (1, 1)
    assert equal(ibnn.load(tmp_path / "0", net).state_dict(), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_a_lock_of_their_own(copied: Callable[[Any], Any]) -> None:
    model = METHODS["ensemble"]()
    other = copied(model)
    with model.evaluating(), beside(lambda: other.predict(X[:4])):  # which would wait for ever
        pass
    assert other.members[0]._lock is other._lock is not model._lock
