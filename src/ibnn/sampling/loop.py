"""Samples the latents of a network by Markov chains, one for each component; the samples become its posterior."""

import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ibnn import check
from ibnn.batches import as_source
from ibnn.errors import complaint
from ibnn.files import sealed
from ibnn.files.saving import fingerprint
from ibnn.network import IBNN
from ibnn.normal import Space, address, normals
from ibnn.progress import Bar
from ibnn.sampling.chains import FEWEST, Samples
from ibnn.sampling.hmc import AT_ONCE, ON_CPU, Energy, Moves, State

EVERY = 30.0  # seconds between checkpoints
FILE = "chains.safetensors"


def sample(
    model: IBNN,
    data: Any,
    *,
    samples: int = 100,
    warmup: int = 300,
    thin: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    run_dir: str | Path | None = None,
    progress: bool = True,
) -> Samples:
    """Samples the posterior of the latents, p(z | data)^(1/T), by HMC on all data, with the weights as they are.

    The log posterior is Σ log p(y | x, z) over all data + log N(z; 1, s²). Chain k starts with a draw of component k.
    The samples become the model's posterior (`IBNN.set_bank`) for `predict`, `draw` and `export`. A convolution's z is
    a factor for each channel: factors of units (`draws="both"`) are 1 in the chains and in the samples.

    Args:
        model: Made by `ibnn.convert`, usually trained by `ibnn.fit`; it is sampled in eval mode.
        data: Training data: a pair (inputs, targets), a Dataset without augmentation, or a DataLoader of one.
        samples: S, samples kept of each chain.
        warmup: Trajectories before the first that may be kept, in which scales and step size adapt.
        thin: Trajectories from one kept sample to the next.
        temperature: T. 1 is Bayes; below 1 the posterior is cold.
        seed: Decides starts and noise.
        run_dir: Folder for a checkpoint. The same call on the same folder resumes, to the bit.
        progress: Shows a bar in a terminal.

    Raises:
        DivergedChainError: If a chain leaves the finite numbers; the model is then as it was.
        DamagedError: If the checkpoint is damaged.

    >>> import ibnn
    >>> x = torch.randn(50, 3)
    >>> model = ibnn.convert(torch.nn.Linear(3, 2), components=2, seed=0).eval()
    >>> found = sample(model, (x, (x[:, 0] > 0).long()), samples=20, warmup=40)
    >>> found.z.shape, model.predict(x, samples=20).probs.shape
    (torch.Size([2, 20, 3]), torch.Size([50, 2]))
    """
    facts = {"samples": samples, "warmup": warmup, "thin": thin, "temperature": temperature, "seed": seed}
    for name, least in {"samples": FEWEST, "warmup": 10, "thin": 1}.items():
        check.integer(name, facts[name], least=least)
    check.number("temperature", temperature, above=0, remedy="Pass 1.0 for Bayes.")
    check.seed(seed)
    _check_model(model)
    folder = None if run_dir is None else check.path("run_dir", run_dir, folder=True)
    source = as_source(data, batch_size=AT_ONCE, name="data", shuffled=False, pack=model.likelihood.pack)
    if not source.divisible:
        raise TypeError(complaint("data", "a Dataset or a pair (x, y)", "a sampler or iterable", "Pass the Dataset."))
    if source.rows < 2:
        raise ValueError(complaint("data", "two rows or more", source.rows, "The prior is nearly the posterior."))
    with model.evaluating(), Bar("hmc", warmup + samples * thin, shown=progress) as bar:
        moves = Moves(Energy(model, source, temperature, seed), warmup, seed)
        found = _Run(moves, facts, folder).run(bar)
        model.set_bank(found.z)
    return found


class _Run:
    """Chains from start to end, and their samples.

    `state` alone says how far the run is. A step first writes its sample, at the place that its number decides, then
    replaces the state: a run that is interrupted in between repeats the step.
    """

    def __init__(self, moves: Moves, facts: dict[str, Any], folder: Path | None) -> None:
        self.moves, self.facts, self.folder, energy = moves, facts, folder, moves.energy
        model, device = energy.model, energy.device
        self.z = torch.zeros(model.components, facts["samples"], model.nodes, dtype=energy.dtype)
        self.energy, self.seconds = torch.zeros(self.z.shape[:2], dtype=torch.float64), 0.0
        if folder is not None:
            self.facts = facts | {"data": energy.source.fingerprint(), "weights": fingerprint(model.net)}
        if (state := self._resumed()) is None:
            chain = torch.arange(model.components, device=device)
            noise = normals(address(facts["seed"], Space.CHAIN_START, chain), model.nodes)
            state = moves.start(model.posterior().draw(chain, noise).detach())
        self.state = state

    def run(self, bar: Bar) -> Samples:
        """Goes on to the end; saves now and then, and when it is interrupted."""
        first, before = self.state, self.seconds
        warmup, thin, temperature = (self.facts[name] for name in ("warmup", "thin", "temperature"))
        kept = thin * self.facts["samples"]
        began = saved = time.monotonic()
        try:
            while (step := int(self.state.at)) < warmup + kept:
                state = self.moves.advance(self.state)
                number, rest = divmod(step + 1 - warmup, thin)
                if number > 0 and rest == 0:
                    self.z[:, number - 1] = state.z.cpu()
                    self.energy[:, number - 1] = temperature * state.potential.cpu().double()
                self.state = state
                self.seconds = before + time.monotonic() - began
                bar.update(done=step + 1)
                if time.monotonic() - saved > EVERY:
                    self._save()
                    saved = time.monotonic()
        finally:
            if self.state is not first:
                self._save()
        return Samples(
            z=self.z,
            energy=self.energy,
            temperature=temperature,
            step_size=float(self.state.step),
            acceptance=float(self.state.accepted) / kept,
            divergent=int(self.state.divergent),
            seconds=self.seconds,
        )

    def _resumed(self) -> State | None:
        """Reads the checkpoint, if there is one; raises if it belongs to other chains."""
        if self.folder is None or not (path := self.folder / FILE).is_file():
            return None
        tensors, facts = sealed.read_tensors(path, remedy="Remove the file to start anew.")
        if changed := [name for name in self.facts if facts.get(name) != self.facts[name]]:
            got = "one with " + ", ".join(f"{name} = {facts.get(name)}" for name in changed)
            raise ValueError(complaint("run_dir", "a folder of the same chains", got, "Use another folder."))
        self.z, self.energy, self.seconds = tensors["z"], tensors["energy"], facts["seconds"]
        device = self.moves.energy.device
        saved = {name: tensors[f"state.{name}"] for name in State._fields}
        return State(**{name: value if name in ON_CPU else value.to(device) for name, value in saved.items()})

    def _save(self) -> None:
        if self.folder is not None:
            state = {f"state.{name}": value for name, value in self.state._asdict().items()}
            facts = self.facts | {"seconds": self.seconds}
            sealed.write_tensors(self.folder / FILE, state | {"z": self.z, "energy": self.energy}, facts)


def _check_model(model: IBNN) -> None:
    """Raises unless a model has latents, and answers each row by itself."""
    if not isinstance(model, IBNN) or not model.latents:
        remedy = "Convert it first: sample(ibnn.convert(net), data)."
        raise TypeError(complaint("model", "an IBNN made by convert", type(model).__name__, remedy))
    norms = [(name, m) for name, m in model.net.named_modules() if isinstance(m, _BatchNorm)]
    if batchwise := [name for name, norm in norms if norm.training or norm.running_mean is None]:
        expected, got = "a network that answers each row by itself", f"BatchNorm over the batch: {batchwise}"
        remedy = "Call model.eval(); BatchNorm without running statistics cannot be sampled."
        raise ValueError(complaint("model", expected, got, remedy))
