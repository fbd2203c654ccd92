"""`conformalize`: stores how far held-out targets are from a model's answers, for sets and intervals that cover."""

from typing import Any

import torch

from ibnn.batches import as_source
from ibnn.errors import complaint
from ibnn.generators import generators_restored
from ibnn.inputs import as_tensors, tree_map
from ibnn.layers.explain import explaining_shapes
from ibnn.prediction.conformal import Conformal, HeldOut, check_groups
from ibnn.prediction.predict import check_options, explaining_cuts, predict


def conformalize(
    model: Any, valid: Any, *, groups: Any = None, samples: int = 5, seed: int = 0, batch_size: int | None = 256
) -> HeldOut:
    """Stores how far held-out targets are from a model's answers, so that `p.set` and `p.interval` cover.

    The distances are returned, and stored as `model.held_out`. `ibnn.fit`, `ibnn.calibrate` and `ibnn.fit_novelty` do
    so themselves, from 50 held-out rows on. Call this after them for groups, another number of draws or fewer rows.
    Training, other noise or another temperature makes them void.

    Args:
        model: A trained model: a converted network, a baseline, or a plain network as `ibnn.baselines.Plain(net)`.
        valid: Held-out data as `fit` takes it: a pair (x, y), a Dataset or a DataLoader. Nothing may have been trained
            on them. Several heads have a dict of targets.
        groups: The group of every row, (N,), an integer: sites, devices, age bands. Rows of a DataLoader are in the
            order of its dataset.
        samples: Draws per component, as later answers will have.
        seed: Decides the draws.
        batch_size: Rows that go through the network at once; None never cuts a batch.

    >>> import ibnn
    >>> x, y = torch.randn(99, 4), torch.randint(3, (99,))
    >>> model = ibnn.convert(torch.nn.Linear(4, 3), components=2, seed=0)
    >>> _ = conformalize(model, (x, y), groups=y % 2)
    >>> model.predict(x[:5]).set(0.9, groups=y[:5] % 2).shape
    torch.Size([5, 3])
    """
    if not hasattr(model, "held_out"):
        remedy = "Convert it first, ibnn.convert(net), or wrap it: ibnn.baselines.Plain(net)."
        raise TypeError(complaint("model", "a converted network or a baseline", type(model).__name__, remedy))
    check_options(samples, seed, batch_size)
    source = as_source(valid, batch_size=batch_size, name="valid", shuffled=False, pack=model.likelihood.pack)
    if groups is not None:
        groups = check_groups(groups, source.rows)
        if not source.divisible:
            got = "a sampler or iterable of your own, which chooses the rows"
            raise ValueError(complaint("groups", "given for rows in a known order", got, "Pass a pair (x, y)."))
    batches: list[list[Conformal | None]] = []
    device, dtype = (getattr(next(model.parameters()), name) for name in ("device", "dtype"))
    with generators_restored(), explaining_cuts(batch_size, source.rows):
        for share in source.epoch(seed, 0):
            x = tree_map(lambda t: t.to(device), as_tensors(share.x, dtype))
            with model.evaluating(), torch.no_grad(), explaining_shapes(model.net, x, "valid"):
                model.likelihood.check(model.mean_output(x), share.y.to(device))
            p = predict(model, x, samples=samples, seed=seed, batch_size=batch_size, novelty=False)
            batches.append(model.likelihood.distances(p.to("cpu"), share.y.cpu()))
    model.held_out = HeldOut.of(model.likelihood, batches, groups)
    if model.held_out is None:
        got, remedy = type(model.likelihood).__name__, "Give the likelihood a `distances` method."
        raise ValueError(complaint("model", "of a likelihood that says how far targets are", got, remedy))
    return model.held_out.to(device)  # type: ignore[no-any-return]
