"""Named numbers that pin the answers of the library, group by group.

`python tests/golden.py --write [GROUP …]` computes them and writes `golden.json`; `test_golden.py` computes them again
and compares. Data and weights come from sines, not from random generators, and are doubles, so that every CPU agrees.
"""

import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ibnn
from ibnn.mixture import entropy_bound

FILE = Path(__file__).with_name("golden.json")

Numbers = dict[str, list[float]]
K = 3


# ------------------------------------------------------------------------------------------- data, networks, numbers


def waves(*shape: int, phase: float = 0.0) -> Tensor:
    """Returns irregular doubles in [−1, 1] that depend on nothing but shape and phase."""
    at = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(0.7 * at + 0.013 * at * at + phase).reshape(shape)


def set_weights(net: nn.Module) -> nn.Module:
    """Makes a network double, with weights by `waves`."""
    net = net.double()
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            wave = waves(*parameter.shape, phase=1.0 + number)
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 4
            parameter.copy_(wave * math.sqrt(2 / fan_in) if parameter.dim() > 1 else 1 + 0.2 * wave)
    return net


def mlp(inputs: int = 5, outputs: int = 3, hidden: int = 8) -> nn.Module:
    return set_weights(nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)))


def cnn() -> nn.Module:
    layers = nn.Conv2d(2, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(), nn.Conv2d(10, 4, 3, stride=2, padding=1)
    return set_weights(nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)))


def classes(rows: int = 120, phase: float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns inputs (rows, 5) and labels of three classes that a network can learn, with some noise."""
    x = waves(rows, 5, phase=phase) * 1.5
    score = torch.stack([x[:, 0] + x[:, 1], x[:, 2] - x[:, 0], x[:, 3] - x[:, 1]], 1)
    return x, (score + 0.8 * waves(rows, 3, phase=phase + 2)).argmax(1)


def values(rows: int = 120, phase: float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns inputs (rows, 5) and numbers (rows, 1)."""
    x = waves(rows, 5, phase=phase) * 1.5
    return x, (x[:, :1] * x[:, 1:2] + x[:, 2:3] + 0.3 * waves(rows, 1, phase=phase + 2))


def digest(tensor: Any) -> list[float]:
    """Returns a few entries, the norm and a weighted sum: any change of any entry shows."""
    flat = torch.as_tensor(tensor).detach().double().flatten()
    weights = torch.cos(torch.arange(len(flat), dtype=torch.float64))
    if len(flat) <= 3:
        return [float(value) for value in flat]
    return [float(value) for value in (*flat[:3], flat.norm(), (flat * weights).sum())]


def converted(net: nn.Module, **options: Any) -> ibnn.IBNN:
    return ibnn.convert(net, **{"components": K, "seed": 3, "init_std": 0.2, **options})


def state(model: nn.Module) -> list[float]:
    """Returns a digest of all trained parameters."""
    return digest(torch.cat([p.detach().double().flatten() for p in model.parameters()]))


def fitted(model: Any, data: Any, *args: Any, **options: Any) -> Any:
    return ibnn.fit(model, data, *args, quiet=True, **{"novelty": False, "batch_size": 32, **options})


# ------------------------------------------------------------------------------------------------------------ groups


class Recurrent(nn.Module):
    """The last state of a recurrent layer, and a head on it."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.cell, self.head = kind(4, 5, batch_first=True, **options), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Attention(nn.Module):
    """Attention of a sequence to itself, and a head on its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(x, x, x)[0].mean(1))


class Words(nn.Module):
    """An embedding, a transformer layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


class Product(nn.Module):
    """A bilinear layer of an input with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, torch.tanh(x))


class Two(nn.Module):
    """A network with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.size, self.kind = nn.Linear(5, 6), nn.Linear(6, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        return {"size": self.size(hidden), "kind": self.kind(hidden)}


Case = tuple[nn.Module, Tensor, dict[str, Any]]


def cases() -> dict[str, Case]:
    """Returns networks with inputs and options of `convert`."""
    image, wide, rows, sequence = waves(6, 2, 6, 6), waves(6, 12, 6, 6), waves(6, 5), waves(6, 7, 4)
    signal, tokens = waves(6, 2, 8), (torch.arange(24) * 5 % 9).view(6, 4)
    line = nn.Sequential(nn.Conv1d(2, 3, 3, groups=1), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2))
    up = nn.Sequential(nn.ConvTranspose1d(2, 3, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(51, 2))
    grouped = nn.Sequential(nn.Conv2d(12, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2))
    found: dict[str, Case] = {
        "mlp": (mlp(), rows, {}),
        "mlp_output_bias": (mlp(), rows, {"where": "both", "bias_latents": "node"}),
        "mlp_output_layer_bias": (mlp(), rows, {"where": "output", "bias_latents": "layer"}),
        "cnn_output_bias": (cnn(), image, {"where": "both", "bias_latents": "node"}),
        "gru": (set_weights(Recurrent(nn.GRU)), sequence, {}),
        "lstm": (set_weights(Recurrent(nn.LSTM, num_layers=2)), sequence, {}),
        "attention": (set_weights(Attention()), sequence, {}),
        "transformer": (set_weights(Words()), tokens, {}),
        "embedding": (set_weights(Words()), tokens, {"include": ["embed", "head"]}),
        "bilinear": (set_weights(Product()), waves(6, 4), {}),
        "conv1d": (set_weights(line), signal, {}),
        "conv_transpose": (set_weights(up), signal, {}),
        "conv_groups": (set_weights(grouped), wide, {"draws": "unit"}),
    }
    return found | {f"cnn_{draws}": (cnn(), image, {"draws": draws}) for draws in ("channel", "unit", "both")}


def forward() -> Numbers:
    """Outputs in train and eval mode, and gradients of the former."""
    found: Numbers = {}
    for name, (net, x, options) in cases().items():
        model = converted(net, **options)
        if name.startswith("cnn") or name == "conv_groups":
            model.set_posterior(unit_std=0.2)
        model.train()
        output = model(x)
        found[f"{name}.train"] = digest(output)
        output.square().sum().backward()
        found[f"{name}.gradient"] = digest(
            torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
        )
        found[f"{name}.eval"] = digest(model.eval()(x))
    return found


def single() -> Numbers:
    """Outputs in single precision, whose last digits differ from CPU to CPU: rounded to what must agree."""
    found: Numbers = {}
    for name, (net, x, options) in cases().items():
        x = x.float() if x.is_floating_point() else x
        model = converted(net.float(), **options)
        for mode, output in (("train", model.train()(x)), ("eval", model.eval()(x))):
            found[f"{name}.{mode}"] = digest(output)
    return found


def draws() -> Numbers:
    """The networks of single draws and of components, and raw outputs of draws."""
    found: Numbers = {}
    for name in ("mlp", "cnn_both", "gru", "mlp_output_bias"):
        net, x, options = cases()[name]
        model = converted(net, **options).eval()
        model.set_posterior(std=0.15)
        found[f"{name}.latents"] = digest(model.draw_latents(2, 5).z)
        found[f"{name}.logits"] = digest(model.draw_logits(x, samples=2, seed=5))
        found[f"{name}.draw"] = digest(model.draw(component=1, index=1, seed=5)(x))
        found[f"{name}.component"] = digest(model.component(2)(x))
        found[f"{name}.mean_output"] = digest(model.mean_output(x))
    return found


def kl() -> Numbers:
    """KLs of all kinds, and the entropy."""
    found: Numbers = {}
    for name in ("mlp", "cnn_both", "mlp_output_bias"):
        net, _, options = cases()[name]
        model = converted(net, **options)
        for kind in ("components", "mean", "pairwise", "montecarlo"):
            found[f"{name}.{kind}"] = digest(model.kl(kind))
        found[f"{name}.entropy"] = digest(entropy_bound(model.posterior()))
    return found


def _terms(model: ibnn.IBNN, x: Tensor, y: Any, *, nll: bool = True, **options: Any) -> list[float]:
    """Returns terms of the ELBO, and the norms of the gradients of each parameter group."""
    groups = model.parameter_groups(1e-3)
    terms = model.train().elbo(x, y, n_data=500, **options)
    terms.loss.backward()
    norms = [torch.stack([p.grad.norm() for p in g["params"] if p.grad is not None]).norm() for g in groups]
    named = [terms.loss, *([terms.nll] if nll else []), terms.kl, terms.entropy]
    return [float(value.detach()) for value in (*named, *norms)]


def elbo() -> Numbers:
    """Terms of the ELBO and gradient norms of weights and latents."""
    x, y = classes(20)
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    ignored = torch.where(torch.arange(20) % 5 == 0, -100, y)
    found = {
        "one": _terms(converted(mlp()), x, y),
        "two_samples": _terms(converted(mlp()), x, y, samples=2, beta=0.5, gamma=0.1),
        "paper_kl": _terms(converted(mlp(), kl="mean"), x, y),
        "montecarlo_kl": _terms(converted(mlp(), kl="montecarlo"), x, y),
        "output_bias": _terms(converted(mlp(), where="both", bias_latents="node"), x, y),
        "ignored": _terms(converted(mlp()), x, ignored),
    }
    for name, options in (("weighted", {"weight": weight}), ("smoothed", {"label_smoothing": 0.1})):
        likelihood = ibnn.Categorical(**options)
        found[name] = _terms(converted(mlp(), likelihood=likelihood), x, ignored, nll=False)
    for part in ("channel", "unit", "both"):
        model = converted(cnn(), draws=part)
        model.set_posterior(unit_std=0.1)
        found[f"cnn_{part}"] = _terms(model, waves(20, 2, 6, 6), y, samples=2)
    found["gaussian"] = _terms(converted(mlp(outputs=1), likelihood="gaussian"), *values(20))
    predicted = ibnn.Gaussian(noise="predicted")
    found["gaussian_predicted"] = _terms(converted(mlp(outputs=2), likelihood=predicted), *values(20))
    found["bernoulli"] = _terms(converted(mlp(), likelihood="bernoulli"), x, (x[:, :3] > 0).double())
    heads = converted(set_weights(Two()), likelihood={"size": "gaussian", "kind": "categorical"})
    found["heads"] = _terms(heads, x, {"size": values(20)[1], "kind": y}, nll=False)
    return found


def _answer(model: Any, x: Any, **options: Any) -> Numbers:
    """Returns all parts of a prediction."""
    p = ibnn.predict(model, x, **options)
    names = ("probs", "mean", "std", "aleatoric", "between", "within", "standard_error", "draws")
    return {name: digest(value) for name in names if isinstance(value := getattr(p, name, None), Tensor)}


def _named(prefix: str, numbers: Mapping[str, list[float]]) -> Numbers:
    return {f"{prefix}.{name}": value for name, value in numbers.items()}


def predict() -> Numbers:
    """Predictions with all their parts."""
    found: Numbers = {}
    for name in ("mlp", "cnn_both", "cnn_channel", "gru", "transformer"):
        net, x, options = cases()[name]
        model = converted(net, **options).eval()
        found |= _named(name, _answer(model, x, samples=4, seed=2))
    model = converted(mlp(), prior_std=0.5).eval()
    model.set_posterior(std=0.3)
    found |= _named("auto", _answer(model, classes(40)[0], samples="auto"))
    found |= _named("tolerance", _answer(model, classes(40)[0], samples=8, tolerance=0.05, batch_size=16))
    found |= _named("gaussian", _answer(converted(mlp(outputs=1), likelihood="gaussian"), waves(6, 5)))
    predicted = ibnn.Gaussian(noise="predicted")
    model = converted(mlp(outputs=2), likelihood=predicted).eval()
    found |= _named("gaussian_predicted", _answer(model, waves(6, 5)))
    p = ibnn.predict(model, waves(6, 5))
    assert isinstance(p, ibnn.GaussianPrediction)
    found["gaussian_predicted.quantile"] = digest(p.quantile(0.9))
    found["gaussian_predicted.log_prob"] = digest(p.log_prob(values(6)[1]))
    found |= _named("bernoulli", _answer(converted(mlp(), likelihood="bernoulli"), waves(6, 5)))
    heads = converted(set_weights(Two()), likelihood={"size": "gaussian", "kind": "categorical"})
    joint = ibnn.predict(heads, waves(6, 5))
    assert isinstance(joint, ibnn.JointPrediction)
    return found | {"heads.size": digest(joint["size"].std), "heads.kind": digest(joint["kind"].between)}


def fit() -> Numbers:
    """Training with a fixed and with a steered weight of the KL, in one go and resumed."""
    found: Numbers = {}
    data, valid = classes(120), classes(80, phase=9.0)
    fixed: dict[str, Any] = {"beta": 1.0, "epochs": 8}
    model = converted(mlp())
    fitted(model, data, **fixed)
    found["fixed"] = [*state(model), *_answer(model, valid[0])["probs"]]
    model = converted(mlp())
    fitted(model, data, valid, epochs=8, samples=2)
    found["steered"] = [*state(model), model.prior_std, *_answer(model, valid[0])["probs"]]
    model = converted(cnn())
    images = waves(60, 2, 6, 6), classes(60)[1]
    fitted(model, images, (waves(40, 2, 6, 6, phase=5.0), classes(40, phase=5.0)[1]), epochs=5)
    found["steered_cnn"] = [*state(model), *digest(model.unit_std), *_answer(model, images[0])["probs"]]
    model = converted(cnn(), draws="unit")
    fitted(model, images, images, epochs=3)
    found["steered_unit"] = [*state(model), *digest(model.unit_std), *digest(model.prior_factors)]
    model = converted(mlp(outputs=1), likelihood="gaussian")
    fitted(model, values(120), values(80, phase=9.0), epochs=6, accumulate=2)
    found["steered_gaussian"] = [*state(model), *_answer(model, valid[0])["std"]]
    model = converted(mlp(), kl="mean")
    fitted(model, data, epochs=4, beta=0.5, gamma=0.01, optimiser="sgd", lr=0.05, latent_optimiser="sgd", undo_k=False)
    found["sgd"] = state(model)
    for name, options in (("resumed", fixed), ("resumed_steered", {"epochs": 8, "samples": 2})):
        with tempfile.TemporaryDirectory() as folder:
            held = () if name == "resumed" else (valid,)
            stop = _Stop(14)
            with contextlib.suppress(KeyboardInterrupt):
                fitted(converted(mlp()), data, *held, run_dir=folder, checkpoint_every=3, callbacks=[stop], **options)
            assert stop.raised
            model = converted(mlp())
            fitted(model, data, *held, run_dir=folder, checkpoint_every=3, **options)
            found[name] = [*state(model), *_answer(model, valid[0])["probs"]]
    return found


class _Stop:
    """A callback that interrupts training after some steps."""

    def __init__(self, step: int) -> None:
        self.step, self.raised = step, False

    def __call__(self, row: Any, model: Any) -> None:
        if int(row["step"]) >= self.step:
            self.raised = True
            raise KeyboardInterrupt


def averages() -> Numbers:
    """Averages of weights, and the best of several evaluations."""
    found: Numbers = {}
    data, valid = classes(120), classes(80, phase=9.0)
    for name, options in (("ema", {"ema": 0.9}), ("swa", {"swa": 0.5}), ("patience", {"patience": 2, "lr": 0.05})):
        model = converted(mlp())
        fitted(model, data, valid, beta=1.0, epochs=6, **options)
        found[name] = [*state(model), *_answer(model, valid[0])["probs"]]
    model = converted(cnn())
    fitted(model, (waves(60, 2, 6, 6), classes(60)[1]), beta=1.0, epochs=4, swa=0.5)
    running = torch.cat([b.flatten() for name, b in model.net.named_buffers() if "running" in name])
    return found | {"swa_batchnorm": [*state(model), *digest(running)]}


def baselines() -> Numbers:
    """The other methods: trained, and their answers."""
    from ibnn.baselines import Ensemble, MCDropout, MeanField, Plain, scale_temperature

    data, valid = classes(120), classes(80, phase=9.0)
    other = set_weights(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))
    made: dict[str, Any] = {
        "plain": Plain(mlp()),
        "dropout": MCDropout(mlp(), rate=0.2),
        "ensemble": Ensemble([mlp(), other]),
        "mean_field": MeanField(mlp()),
    }
    found: Numbers = {}
    for name, method in made.items():
        fitted(method, data, epochs=8, lr=0.03, weight_decay=1e-3)
        found[f"{name}.state"] = state(method)
        found |= _named(name, _answer(method, valid[0], samples=3))
        found[f"{name}.temperature"] = [scale_temperature(method, valid, samples=3)]
        found[f"{name}.scaled"] = _answer(method, valid[0], samples=3)["probs"]
    return found


def swag() -> Numbers:
    """SWAG in single precision, the only one that it draws in."""
    from ibnn.baselines import SWAG

    (x, y), method = classes(120), SWAG(mlp().float(), rank=3)
    fitted(method, (x.float(), y), epochs=6, swa=0.3)
    return {"state": state(method), "probs": _answer(method, x[:20].float(), samples=3)["probs"]}


def calibrate() -> Numbers:
    """Noise and temperature by held-out labels; training that starts there."""
    from ibnn.baselines import Plain

    found: Numbers = {}
    valid = classes(1000, phase=9.0)
    net = mlp()
    fitted(Plain(net), classes(120), epochs=8, lr=0.03)
    model = ibnn.convert(net, components=4, seed=0)
    chosen = ibnn.calibrate(model, valid, progress=False)
    found["chosen"] = [chosen.scale, chosen.temperature, chosen.after["nll"], *chosen.cross_nll]
    found |= _named("answer", _answer(model, valid[0][:20], novelty=False))
    model = ibnn.convert(net, components=4, seed=0)
    fitted(model, classes(120), valid, recipe="pretrained", epochs=2)
    found["pretrained"] = [*state(model), *_answer(model, valid[0])["probs"]]
    return found


def sampling() -> Numbers:
    """Chains over the latents."""
    found: Numbers = {}
    data = classes(80)
    model = converted(mlp()).eval()
    samples = ibnn.sample(model, data, samples=6, warmup=12, progress=False)
    found["hmc.bank"] = digest(samples.z)
    found["hmc.energy"] = digest(samples.energy)
    found["hmc.probs"] = _answer(model, data[0][:20], samples=4)["probs"]
    found["hmc.draw"] = digest(model.draw(component=1, index=2)(data[0][:20]))
    return found


def novelty() -> Numbers:
    """p-values of novelty, sets and intervals."""
    found: Numbers = {}
    x, y = classes(200)
    held, odd = classes(150, phase=9.0), torch.cat([classes(20, phase=5.0)[0], 3 * waves(20, 5, phase=4.0)])
    model = converted(mlp()).eval()
    fitted(model, (x, y), beta=1.0, epochs=4)
    ibnn.fit_novelty(model, (x, y), held)
    p = ibnn.predict(model, odd)
    assert isinstance(p, ibnn.CategoricalPrediction)
    found["p_values"] = digest(p.p_value)
    found["sets"] = digest(p.set(0.9, kind="adaptive").double())
    found["sets_by_class"] = digest(p.set(0.8, kind="adaptive", by_class=True).double())
    found |= _named("answer", _answer(model, odd))
    found |= _named("fallback", _answer(model, odd, fallback=0.2))
    found["plain"] = _answer(model, odd, novelty=False)["probs"]
    model = converted(mlp(outputs=1), likelihood="gaussian").eval()
    ibnn.fit_novelty(model, values(200), values(150, phase=9.0))
    q = ibnn.predict(model, odd)
    assert isinstance(q, ibnn.GaussianPrediction)
    found["numbers.p_values"] = digest(q.p_value)
    found["numbers.intervals"] = digest(torch.stack(q.interval(0.9, conformal=True)))
    found["numbers.quantiles"] = digest(torch.stack(q.interval(0.8)))
    model = converted(cnn()).eval()
    images = waves(160, 2, 6, 6), classes(160)[1]
    ibnn.fit_novelty(model, images, (waves(120, 2, 6, 6, phase=3.0), classes(120, phase=3.0)[1]))
    seen = ibnn.predict(model, waves(12, 2, 6, 6, phase=7.0))
    return found | {"images.p_values": digest(seen.p_value)}


def files() -> Numbers:
    """Answers of models that were saved and loaded."""
    found: Numbers = {}
    for name in ("mlp", "cnn_both", "gru", "mlp_output_bias"):
        net, x, options = cases()[name]
        model = converted(net, **options).eval()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            found[f"{name}.whole"] = _answer(ibnn.load(folder, cases()[name][0]), x)["probs"]
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, latents_only=True)
            found[f"{name}.latents"] = _answer(ibnn.load(folder, cases()[name][0]), x)["probs"]
    return found


def export() -> Numbers:
    """Answers of exported programs."""
    found: Numbers = {}
    for name in ("mlp", "cnn_both"):
        net, x, options = cases()[name]
        model = converted(net, **options).eval()
        with tempfile.TemporaryDirectory() as folder:
            written = ibnn.export(model, x[:2], Path(folder) / "model.pt2", samples=2, format="torch")
            answer = torch.export.load(written.path).module()(x)
            found |= {f"{name}.{part}": digest(value) for part, value in answer.items()}
    return found


def prune() -> Numbers:
    """Widths and answers of thinner networks."""
    found: Numbers = {}
    for name, net, data in (
        ("mlp", mlp(hidden=16), classes(120)),
        ("cnn", cnn(), (waves(120, 2, 6, 6), classes(120)[1])),
    ):
        model = converted(net).eval()
        thin = ibnn.prune(model, data, keep=0.6, quiet=True)
        found[f"{name}.widths"] = [float(layer.outputs[1]) for layer in thin.layers]
        found[f"{name}.probs"] = _answer(thin.model, data[0][:20])["probs"]
        found[f"{name}.plain"] = digest(thin.net.eval()(data[0][:20]))
    by = {name: waves(latent.nodes).abs() for name, latent in converted(mlp(hidden=16)).latents.items()}
    thin = ibnn.prune(converted(mlp(hidden=16)).eval(), classes(120), keep=0.5, by=by, quiet=True)
    return found | {"by.probs": _answer(thin.model, classes(20)[0])["probs"]}


def sklearn() -> Numbers:
    """Estimators of tables."""
    from ibnn.sklearn import IBNNClassifier, IBNNRegressor

    x, y = classes(120)
    classifier = IBNNClassifier((8,), epochs=5, random_state=0, prior_std=0.3).fit(x.numpy(), y.numpy())
    numbers = values(120)[1][:, 0].numpy()
    regressor = IBNNRegressor((8,), epochs=5, random_state=0, prior_std=0.3).fit(x.numpy(), numbers)
    return {
        "classifier": digest(classifier.predict_proba(x[:20].numpy())),
        "regressor": digest(regressor.predict(x[:20].numpy())),
        "regressor_std": digest(regressor.predict(x[:20].numpy(), return_std=True)[1]),
    }


GROUPS: dict[str, Callable[[], Numbers]] = {
    group.__name__: group
    for group in (
        forward, single, draws, kl, elbo, predict, fit, averages, baselines, swag, calibrate, sampling, novelty, files,
        export, prune, sklearn,
    )
}  # fmt: skip
TOLERANCES = {"single": 1e-5, "swag": 1e-4, "sklearn": 1e-4}  # relative; 1e-6 elsewhere


def main(arguments: list[str]) -> None:
    """Computes all groups, or those that are named, and writes or prints them."""
    torch.set_num_threads(1)
    names = [name for name in arguments if not name.startswith("-")] or list(GROUPS)
    found = {name: GROUPS[name]() for name in names}
    if "--write" not in arguments:
        print(json.dumps(found, indent=1))
        return
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    lines = {
        group: [f'  "{n}": {json.dumps(v)}' for n, v in numbers.items()] for group, numbers in (kept | found).items()
    }
    FILE.write_text(
        "{\n" + ",\n".join(f' "{g}": {{\n' + ",\n".join(rows) + "\n }" for g, rows in lines.items()) + "\n}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
