"""Runs the library's public functions on a second device, and prints how far each answer is from the CPU's, as JSON.

The device is simulated (`simulated`), or a real one: `IBNN_TEST_DEVICE=cuda`. Each case takes a device and returns
numbers. Data may stay on the host: a case named "… from the host" says so.
"""

import copy
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ibnn
from ibnn import baselines

NAME = os.environ.get("IBNN_TEST_DEVICE", "sim")
CASES: dict[str, Callable[[str], Any]] = {}


def case(run: Callable[[str], Any]) -> Callable[[str], Any]:
    CASES[run.__name__.replace("_", " ")] = run
    return run


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def mlp(outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs))


class Sequence(nn.Module):
    """A recurrent layer or a Transformer's, and a head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        scores: Tensor = self.head((found[0] if isinstance(found, tuple) else found).mean(1))
        return scores


IMAGES, LABELS = seeded(lambda: torch.randn(96, 3, 8, 8)), seeded(lambda: torch.randint(0, 4, (96,)))
ROWS, TOKENS = seeded(lambda: torch.randn(160, 6), 1), seeded(lambda: torch.randn(24, 5, 8), 2)
CLASSES, NUMBERS = (ROWS[:, :4] * 2).argmax(1), ROWS[:, :1] * 2 + 1


def stepped(model: Any, x: Tensor, y: Tensor, steps: int = 3) -> Tensor:
    """Takes steps of training; returns the losses and what is predicted then."""
    optimiser = torch.optim.SGD(model.parameter_groups(0.05), 0.05)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = model.train().elbo(x, y, n_data=y.numel()).loss
        loss.backward()
        optimiser.step()
        losses.append(loss.detach().cpu())
    answer = model.predict(x[:9], samples=2, progress=False)
    main = answer.probs if hasattr(answer, "probs") else answer.mean
    return torch.cat([torch.stack(losses), main.cpu().flatten(), answer.epistemic.cpu().flatten()])


def layer_case(name: str, make: Callable[[], nn.Module], x: Tensor, y: Tensor, **options: Any) -> None:
    def run(device: str) -> Tensor:
        model = ibnn.convert(seeded(make), components=3, seed=0, **options).to(device)
        return stepped(model, x.to(device), y.to(device))

    CASES[f"layers: {name}"] = run


layer_case("convolution, both", cnn, IMAGES[:24], LABELS[:24])
layer_case("convolution, channel", cnn, IMAGES[:24], LABELS[:24], draws="channel")
layer_case("linear", mlp, ROWS[:24], CLASSES[:24])
layer_case("gru", lambda: Sequence(nn.GRU(8, 8, batch_first=True)), TOKENS, LABELS[:24])
layer_case("rnn", lambda: Sequence(nn.RNN(8, 8, batch_first=True)), TOKENS, LABELS[:24])
layer_case("lstm", lambda: Sequence(nn.LSTM(8, 8, batch_first=True)), TOKENS, LABELS[:24])
encoder = lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)  # noqa: E731
layer_case("transformer", lambda: Sequence(encoder()), TOKENS, LABELS[:24])
layer_case("transposed", lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.Flatten(), nn.Linear(324, 4)),
           IMAGES[:12], LABELS[:12])  # fmt: skip
layer_case("outputs and biases", mlp, ROWS[:24], CLASSES[:24], where="both", bias_latents="node")
layer_case("gaussian", lambda: mlp(1), ROWS[:24], NUMBERS[:24], likelihood="gaussian")
layer_case("bernoulli", lambda: mlp(2), ROWS[:24], (ROWS[:24, :2] > 0).float(), likelihood="bernoulli")
layer_case("half precision", lambda: mlp().half(), ROWS[:24].half(), CLASSES[:24])
for kl in ("mean", "pairwise", "montecarlo"):
    layer_case(f"kl {kl}", mlp, ROWS[:24], CLASSES[:24], kl=kl)


def converted(device: str, **options: Any) -> Any:
    return ibnn.convert(seeded(mlp), components=3, seed=0, **options).to(device)


@case
def predict_from_the_host(device: str) -> Tensor:
    model = ibnn.convert(seeded(cnn), components=3, seed=0).to(device)
    return model.predict(IMAGES[:7], samples=2, progress=False).probs


@case
def predict_with_a_tolerance(device: str) -> Tensor:
    return converted(device).predict(ROWS[:20].to(device), samples=4, tolerance=0.1, progress=False).probs.cpu()


@case
def draws_and_components(device: str) -> Tensor:
    model, x = converted(device), ROWS[:5].to(device)
    own = [ibnn.draws(model, x, samples=2).flatten(), model.draw(1, 1)(x).flatten(), model.component(0)(x).flatten()]
    return torch.cat(own).detach().cpu()


@case
def fit_from_the_host(device: str) -> Tensor:
    model = converted(device)
    ibnn.fit(model, (ROWS[:120], CLASSES[:120]), (ROWS[120:], CLASSES[120:]), epochs=2, batch_size=32, quiet=True)
    assert next(model.parameters()).device.type == torch.device(device).type
    return model.predict(ROWS[:9].to(device), progress=False).probs.cpu()


@case
def all_with_data_on_it(device: str) -> Tensor:
    model, (x, y) = converted(device), (ROWS.to(device), CLASSES.to(device))
    ibnn.fit(model, (x[:120], y[:120]), (x[120:], y[120:]), epochs=1, batch_size=32, quiet=True)
    report, diagnosis = ibnn.calibrate(model, (x, y), progress=False), ibnn.diagnose(model, inputs=x)
    ibnn.fit_novelty(model, (x[:80], y[:80]), (x[80:], y[80:]))
    fast, answer = ibnn.distil(model, x, epochs=1, progress=False), model.predict(x, progress=False)
    assert all(map(str, (report, diagnosis, fast, answer, answer.to_pandas())))
    rule = ibnn.abstain(answer, y, 0.5)
    found = (answer.probs, answer.p_value, rule(answer), fast.predict(x).probs)
    scores = torch.tensor(
        [*model.likelihood.score(answer, y).values(), *report.after.values(), diagnosis.epistemic_share]
    )
    return torch.cat([scores, *(part.float().cpu().flatten() for part in found)])


@case
def fit_resumed(device: str) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            model = converted(device)
            ibnn.fit(model, (ROWS[:96], CLASSES[:96]), run_dir=folder, beta=1.0, epochs=2, batch_size=32, quiet=True)
        return model.predict(ROWS[:9].to(device), progress=False).probs.cpu()


@case
def calibrate_with_novelty(device: str) -> Tensor:
    model = converted(device)
    report = ibnn.calibrate(model, (ROWS, CLASSES), progress=False)
    answer = model.predict(ROWS[:9].to(device), progress=False)
    return torch.cat(
        [torch.tensor([report.scale, report.temperature]), answer.probs.cpu().flatten(), answer.p_value.cpu()]
    )


@case
def sample_chains(device: str) -> Tensor:
    model = converted(device)
    ibnn.sample(model, (ROWS[:64], CLASSES[:64]), samples=4, warmup=10, progress=False)
    return model.predict(ROWS[:9].to(device), progress=False).probs.cpu()


@case
def diagnose(device: str) -> Tensor:
    report = ibnn.diagnose(converted(device), inputs=ROWS[:16].to(device))
    return torch.tensor([row.nodes for row in report.layers], dtype=torch.float)


@case
def prune(device: str) -> Tensor:
    model = ibnn.convert(seeded(cnn), components=2, seed=0).to(device)
    thin = ibnn.prune(model, (IMAGES, LABELS), 0.5, quiet=True).model
    return thin.predict(IMAGES[:5].to(device), progress=False).probs.cpu()


@case
def saved_here_loaded_on_the_cpu_and_back(device: str) -> Tensor:
    model = converted(device)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = ibnn.load(folder, seeded(mlp))
    assert next(loaded.parameters()).device.type == "cpu"
    there = loaded.to(device).predict(ROWS[:9].to(device), progress=False).probs.cpu()
    return there - model.predict(ROWS[:9].to(device), progress=False).probs.cpu()


@case
def exported_from_it(device: str) -> Tensor:
    model = converted(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt2")
        ibnn.export(copy.deepcopy(model), ROWS[:9].to(device), path, samples=2, format="torch")
        program = torch.export.load(path).module()
    return program(ROWS[:9])["probabilities"]


for made, name in ((baselines.Plain, "plain"), (baselines.MeanField, "mean field")):

    def run(device: str, made: Any = made) -> Tensor:
        return stepped(made(seeded(mlp)).to(device), ROWS[:24].to(device), CLASSES[:24].to(device))

    CASES[f"baselines: {name}"] = run


@case
def a_loop_without_ibnn(device: str) -> Tensor:
    model = converted(device).train()
    x, y = ROWS[:24].to(device), CLASSES[:24].to(device)
    loss = F.cross_entropy(model(x), y) + model.kl() / 24
    loss.backward()
    return torch.cat([p.grad.cpu().flatten() for p in model.parameters() if p.grad is not None])


for made, name in (
    (lambda net: baselines.MCDropout(net, rate=0.2), "dropout"),
    (lambda net: baselines.Plain(net, ibnn.Gaussian()), "gaussian"),
):

    def run(device: str, made: Any = made, name: str = name) -> Tensor:
        y = NUMBERS if name == "gaussian" else CLASSES
        return stepped(
            made(seeded(lambda: mlp(1 if name == "gaussian" else 4))).to(device),
            ROWS[:24].to(device),
            y[:24].to(device),
        )

    CASES[f"baselines: {name}"] = run


@case
def novelty_sets_and_abstention_from_the_host(device: str) -> Tensor:
    model = converted(device)
    ibnn.fit_novelty(model, (ROWS[:80], CLASSES[:80]), (ROWS[80:], CLASSES[80:]))
    answer = model.predict(ROWS[:40], progress=False)
    rule = ibnn.abstain(answer, CLASSES[:40], 0.5)
    found = (answer.p_value, answer.set(0.8).float().flatten(), rule(answer).float(), answer.novel(0.1).float())
    return torch.cat([part.cpu() for part in found])


@case
def several_heads(device: str) -> Tensor:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.body(x).relu()
            return {"label": self.a(h), "size": self.b(h)}

    heads = {"label": "categorical", "size": "gaussian"}
    model = ibnn.convert(seeded(Two), components=2, seed=0, likelihood=heads).to(device)
    x, y = ROWS[:24].to(device), {"label": CLASSES[:24].to(device), "size": NUMBERS[:24].to(device)}
    loss = model.train().elbo(x, y, n_data=48).loss
    loss.backward()
    answer = model.predict(x, progress=False)
    return torch.cat(
        [loss.detach().cpu()[None], answer["label"].probs.cpu().flatten(), answer["size"].mean.cpu().flatten()]
    )


@case
def tokens(device: str) -> Tensor:
    net = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    model = ibnn.convert(net, components=2, seed=0, likelihood=ibnn.Categorical(axis=-1)).to(device)
    y = seeded(lambda: torch.randint(0, 4, (24, 5)), 3)
    return stepped(model, TOKENS.to(device), y.to(device))


@case
def predicted_noise(device: str) -> Tensor:
    net, likelihood = seeded(lambda: mlp(2)), ibnn.Gaussian(noise="predicted")
    model = ibnn.convert(net, components=3, seed=0, likelihood=likelihood).to(device)
    return stepped(model, ROWS[:24].to(device), NUMBERS[:24].to(device))


@case
def standardised_targets(device: str) -> Tensor:
    """Large targets, of which `fit` finds location and scale, then conformal intervals."""
    y, options = 1000 * NUMBERS + 5000, {"likelihood": ibnn.Gaussian(init_std=0.5)}
    model = ibnn.convert(seeded(lambda: mlp(1)), components=3, seed=0, **options).to(device)
    ibnn.fit(model, (ROWS[:100], y[:100]), (ROWS[100:], y[100:]), epochs=2, batch_size=32, quiet=True)
    ibnn.conformalize(model, (ROWS[100:], y[100:]))
    answer = model.predict(ROWS[:9].to(device), progress=False)
    found = (model.likelihood.location, model.likelihood.scale, answer.mean, answer.std, *answer.interval(0.8))
    return torch.cat([part.detach().cpu().flatten() / 5000 for part in found])


@case
def dense_outputs(device: str) -> Tensor:
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)))
    model = ibnn.convert(net, components=2, seed=0).to(device)
    y = seeded(lambda: torch.randint(0, 4, (96, 8, 8)), 3)
    trained = stepped(model, IMAGES[:12].to(device), y[:12].to(device))
    ibnn.calibrate(model, (IMAGES[:48], y[:48]), progress=False)
    ibnn.conformalize(model, (IMAGES[48:], y[48:]))
    answer = model.predict(IMAGES[:3].to(device), progress=False)
    return torch.cat([trained, answer.probs.cpu().flatten(), answer.set(0.8).float().cpu().flatten()])


@case
def draws_of_units(device: str) -> Tensor:
    """One network of a draw, with factors of single units."""
    model, x = ibnn.convert(seeded(cnn), components=2, seed=0).to(device), IMAGES[:5].to(device)
    ibnn.calibrate(model, (IMAGES, LABELS), progress=False)
    return torch.cat([model.draw(1, 2)(x), model.draw_logits(x, 3)[5] - model.draw(1, 2)(x)]).detach().cpu()


@case
def conformalized_by_class_and_group(device: str) -> Tensor:
    model, groups = converted(device), torch.arange(160) % 2
    ibnn.conformalize(model, (ROWS.to(device), CLASSES.to(device)), groups=groups)
    answer = model.predict(ROWS[:40].to(device), progress=False)
    sets = answer.set(0.8, by_class=True), answer.set(0.8, kind="adaptive", penalty=0.02, groups=groups[:40])
    return torch.cat([part.float().cpu().flatten() for part in sets])


@case
def monitors(device: str) -> Tensor:
    model = converted(device)
    ibnn.fit_novelty(model, (ROWS[:80], CLASSES[:80]), (ROWS[80:], CLASSES[80:]))
    monitor = ibnn.ShiftMonitor(model.reference.held_out_p_values())
    answer = model.predict(2 * ROWS[:40].to(device), progress=False)
    p, level = monitor.update(answer.p_value), ibnn.AdaptiveLevel(0.8)
    level.update(answer.set(level.level).gather(1, CLASSES[:40, None].to(device))[:, 0])
    return torch.cat([p.cpu(), torch.tensor([monitor.log_wealth, level.level])])


@case
def ensemble(device: str) -> Tensor:
    members = [ibnn.convert(seeded(mlp, m), components=2, seed=m) for m in range(2)]
    model = ibnn.Ensemble(members).to(device)
    found = stepped(model, ROWS[:24].to(device), CLASSES[:24].to(device))
    temperature = baselines.scale_temperature(model, (ROWS, CLASSES))
    return torch.cat(
        [found, torch.tensor([float(temperature)]), model.eval()(ROWS[:9].to(device)).detach().cpu().flatten()]
    )


@case
def ensemble_of_numbers(device: str) -> Tensor:
    model = ibnn.Ensemble([seeded(lambda: mlp(1), m) for m in range(2)], ibnn.Gaussian()).to(device)
    return stepped(model, ROWS[:24].to(device), NUMBERS[:24].to(device))


@case
def swag(device: str) -> Tensor:
    model = baselines.SWAG(seeded(mlp), rank=2).to(device)
    ibnn.fit(model, (ROWS, CLASSES), epochs=4, swa=0.5, batch_size=32, quiet=True)
    return model.predict(ROWS[:9].to(device), progress=False).probs.cpu()


def distilled(device: str, whole: bool = False, likelihood: str = "categorical") -> Any:
    net = seeded(lambda: mlp(1 if likelihood == "gaussian" else 4))
    model = ibnn.convert(net, components=3, seed=0, init_std=0.3, likelihood=likelihood).to(device)
    return ibnn.distil(model, ROWS, whole=whole, epochs=2, batch_size=64, progress=False)


@case
def distil_from_the_host(device: str) -> Tensor:
    """Classes, the whole network and numbers; what is saved on one device answers on the other."""
    found = []
    for options in ({}, {"whole": True}, {"likelihood": "gaussian"}):
        student = distilled(device, **options)
        with tempfile.TemporaryDirectory() as folder:
            student.save_pretrained(folder)
            loaded = ibnn.load(folder, student.cpu().net.net).to(device)
        answer = loaded.predict(ROWS[:9].to(device), progress=False)
        main = answer.mean if options.get("likelihood") else answer.probs
        found += [main.cpu().flatten(), answer.epistemic.cpu(), torch.tensor(student.report[""].kl)]
    return torch.cat([part.flatten() for part in found])


@case
def generate(device: str) -> Tensor:
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.LlamaConfig(vocab_size=30, pad_token_id=2, eos_token_id=1, bos_token_id=0, **sizes)
    model = ibnn.convert(seeded(lambda: transformers.LlamaForCausalLM(config)), components=2, seed=0).to(device)
    found = model.generate(torch.tensor([[3, 4, 5], [6, 7, 8]], device=device), max_new_tokens=4, samples=2)
    return torch.cat([part.float().cpu().flatten() for part in (found.sequences, found.log_probs, found.epistemic)])


@case
def saved_on_the_cpu_loaded_there(device: str) -> Tensor:
    """A calibrated model with reference and held-out labels, by file and by state dict."""
    model, there = converted("cpu"), converted(device)
    ibnn.calibrate(model, (ROWS, CLASSES), progress=False)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = ibnn.load(folder, seeded(mlp)).to(device)
    there.load_state_dict(model.state_dict())
    answers = [each.predict(ROWS[:9].to(device), progress=False) for each in (loaded, there)]
    model.load_state_dict(there.state_dict())
    answers.append(model.predict(ROWS[:9], progress=False))
    return torch.cat([torch.cat([each.probs.flatten(), each.p_value]).cpu() for each in answers])


@case
def exported_as_onnx(device: str) -> Tensor:
    import onnxruntime

    model = converted(device)
    ibnn.fit_novelty(model, (ROWS[:80], CLASSES[:80]), (ROWS[80:], CLASSES[80:]))
    if device == "cpu":  # what the file should answer
        answer = model.predict(ROWS[:9], samples=2, progress=False)
        return torch.cat([answer.probs.flatten(), answer.p_value])
    with tempfile.TemporaryDirectory() as folder:
        ibnn.export(model, ROWS[:9].to(device), Path(folder, "model.onnx"), samples=2)
        session = onnxruntime.InferenceSession(Path(folder, "model.onnx"), providers=["CPUExecutionProvider"])
    assert next(model.parameters()).device.type == torch.device(device).type
    found = session.run(["probabilities", "p_value"], {"x": ROWS[:9].numpy()})
    return torch.cat([torch.as_tensor(part).flatten() for part in found])


@case
def estimators(device: str) -> Tensor:
    from ibnn.sklearn import IBNNClassifier, IBNNRegressor

    options: dict[str, Any] = {"components": 2, "epochs": 2, "random_state": 0, "device": device}
    classes = IBNNClassifier((8,), **options).fit(ROWS[:, :].numpy(), CLASSES.numpy())
    numbers = IBNNRegressor((8,), **options).fit(ROWS.numpy(), NUMBERS[:, 0].numpy())
    found = classes.predict_proba(ROWS[:9].numpy()).ravel(), numbers.predict(ROWS[:9].numpy())
    return torch.cat([torch.as_tensor(part) for part in found])


def kept(dtype: torch.dtype) -> float:
    """Returns the bytes that a step keeps for its backward pass, over those of the plain network."""
    from torch.autograd.graph import saved_tensors_hooks

    def storage(tensor: Tensor) -> torch.UntypedStorage:
        return (tensor.inner if type(tensor).__name__ == "Sim" else tensor).untyped_storage()  # type: ignore[operator]

    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4),
    ).to(NAME, dtype)  # fmt: skip
    model = ibnn.convert(net, components=4, seed=0).train()
    x, y = seeded(lambda: torch.randn(64, 3, 16, 16)).to(NAME, dtype), LABELS[:64].to(NAME)
    known = {storage(t)._cdata for t in (*net.parameters(), *model.parameters(), *model.buffers())}
    sizes = []
    for loss in (lambda: F.cross_entropy(net(x), y), lambda: model.elbo(x, y, n_data=64).loss):
        loss()
        seen: dict[int, torch.UntypedStorage] = {}

        def pack(t: Tensor, seen: dict[int, torch.UntypedStorage] = seen) -> Tensor:
            if storage(t)._cdata not in known:
                seen[storage(t)._cdata] = storage(t)  # kept alive: no address is used twice
            return t

        with saved_tensors_hooks(pack, lambda t: t):
            loss()
        sizes.append(sum(one.nbytes() for one in seen.values()))
    return sizes[1] / sizes[0]


def talk() -> dict[str, dict[str, int]]:
    """Counts how a second step, prediction and evaluation talk with the host."""
    from simulated import count

    found = {}
    nets: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
        "convolutions": (cnn, IMAGES[:64]),
        "gru": (lambda: Sequence(nn.GRU(8, 8, batch_first=True)), TOKENS),
        "transformer": (lambda: Sequence(encoder()), TOKENS),
    }
    for name, (make, x) in nets.items():
        model = ibnn.convert(seeded(make), components=4, seed=0).to(NAME)
        x, y = x.to(NAME), LABELS[: len(x)].to(NAME)
        optimiser = torch.optim.SGD(model.parameter_groups(0.01), 0.01)

        def step(model: Any = model, x: Tensor = x, y: Tensor = y, optimiser: Any = optimiser) -> None:
            optimiser.zero_grad()
            model.train().elbo(x, y, n_data=64).loss.backward()
            optimiser.step()

        calls: dict[str, Callable[[], Any]] = {
            "step": step,
            "predict": lambda model=model, x=x: model.predict(x, progress=False),
            "more draws": lambda model=model, x=x: model.predict(x, samples=9, progress=False),
            "eval": lambda model=model, x=x: model.eval()(x),
        }
        for kind, call in calls.items():
            call()
            with count() as counted:
                call()
            found[f"{name}: {kind}"] = dict(counted)
    student, x = distilled(NAME), ROWS[:64].to(NAME)
    student.predict(x, progress=False)
    with count() as counted:
        student.predict(x, progress=False)
    return found | {"one pass: predict": dict(counted)}


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    found: dict[str, Any] = {"cases": {}}
    device: AbstractContextManager[None] = nullcontext()
    if NAME == "sim":
        from simulated import register, simulated

        register()  # before autograd starts
        device = simulated()
    expected = {name: run("cpu").double() for name, run in CASES.items()}
    with device:
        for name, run in CASES.items():
            try:
                answer = run(NAME).cpu().double()
                found["cases"][name] = float(
                    (answer - expected[name]).abs().max() / expected[name].abs().max().clamp(1)
                )
            except Exception:
                found["cases"][name] = traceback.format_exc(limit=-4)
        found["talk"] = talk() if NAME == "sim" else {}
        found["kept"] = {str(dtype): kept(dtype) for dtype in (torch.float32, torch.float16)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
