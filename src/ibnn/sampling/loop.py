"""SAMPLING: chains over the latents of a network, one for each component; what they visit becomes its posterior.

The samplers are written here and not taken from posteriors, which has SGLD and SGHMC for torch: it draws from torch's
global generator, so that a chain could not be resumed to the bit; it has no HMC, scales, step sizes that adapt, or
cycles; and its states are those of all parameters, where ours is one tensor (K, nodes).
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ibnn.batches import Source, as_source
from ibnn.errors import complaint
from ibnn.files.saving import fingerprint
from ibnn.inputs import evaluating
from ibnn.network import IBNN
from ibnn.normal import Space, address, normals
from ibnn.progress import Bar
from ibnn.sampling import checkpoint
from ibnn.sampling.energy import Energy
from ibnn.sampling.moves import Moves, State
from ibnn.sampling.samples import Samples
from ibnn.sampling.settings import settings

EVERY = 30.0  # seconds between checkpoints


def sample(
    model: IBNN,
    data: Any,
    method: str = "sghmc",
    *,
    samples: int = 100,
    temperature: float = 1.0,
    run_dir: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> Samples:
    """Samples the posterior of the latents, p(z | data)^(1/T), with the weights as they are.

    The log posterior is Σ log p(y | x, z) over all data + log N(z; 1, s²). Component k starts chain k with a draw of
    its Gaussian. Then the samples are the model's posterior (`IBNN.set_bank`), for `predict`, `draw`, `export` … Of
    convolutions z is a factor for each channel: factors of units (`draws="both"`) are 1 here and in the samples.

    Args:
        model: What `ibnn.convert` made of a network, usually trained by `ibnn.fit`; it is sampled in eval mode.
        data: Training data: a pair (inputs, targets), a Dataset without augmentation, or a DataLoader of one.
        method: "sghmc", "sgld", "cyclical", or "hmc", which uses all data at each step.
        samples: S, samples kept of each chain.
        temperature: T. 1 is Bayes; below 1 the posterior is cold.
        run_dir: Folder for a checkpoint. The same call on the same folder goes on where it was stopped, to the bit.
        progress: Shows a bar in a terminal.
        **options: Further fields of `ibnn.sampling.Settings`, such as `warmup`, `thin`, `batch_size`, `seed`.

    Raises:
        DivergedChainError: If a chain leaves the finite numbers; the model is then as it was.

    >>> import ibnn
    >>> x = torch.randn(50, 3)
    >>> model = ibnn.convert(torch.nn.Linear(3, 2), components=2, seed=0).eval()
    >>> found = sample(model, (x, (x[:, 0] > 0).long()), "hmc", samples=20, warmup=20)
    >>> found.z.shape, model.predict(x, samples=20).probs.shape
    (torch.Size([2, 20, 3]), torch.Size([50, 2]))
    """
    chosen = settings(method, {"samples": samples, "temperature": temperature} | options)
    _check_model(model)
    source = as_source(data, batch_size=chosen.batch_size, name="data", shuffled=False, pack=model.likelihood.pack)
    _check_data(source)
    with model._lock, evaluating(model), Bar(method, chosen.total, shown=progress) as bar:
        batch_size = None if method == "hmc" else chosen.batch_size
        energy = Energy(model, source, batch_size, temperature, chosen.seed)
        found = _Run(model, Moves(energy, chosen), Path(run_dir) if run_dir else None).run(bar)
        model.set_bank(found.z)
    return found


class _Run:
    """Chains from start to end, and what is kept of them."""

    def __init__(self, model: IBNN, moves: Moves, folder: Path | None) -> None:
        self.model, self.moves, self.settings, self.folder = model, moves, moves.settings, folder
        source = moves.energy.source
        self.facts = asdict(self.settings) | {"rows": source.rows, "weights": fingerprint(model.net)} if folder else {}
        self.z: Tensor = torch.zeros(model.components, self.settings.samples, model.nodes, dtype=moves.energy.dtype)
        self.energy, self.kept, self.seconds = torch.zeros(self.z.shape[:2], dtype=torch.float64), 0, 0.0

    def run(self, bar: Bar) -> Samples:
        """Goes on from the checkpoint, or starts; saves now and then, and when it is interrupted."""
        state, began = self._begin(), time.monotonic()
        last, before = began, self.seconds
        try:
            while (step := int(state.at)) < self.settings.total:
                state = self.moves.advance(state)
                if self.settings.keeps(step):
                    self._keep(state)
                self.seconds = before + time.monotonic() - began
                bar.update(done=step + 1)
                if time.monotonic() - last > EVERY:
                    self._save(state)
                    last = time.monotonic()
        except KeyboardInterrupt:
            self._save(state)
            raise
        self._save(state)
        return self._samples(state)

    def _begin(self) -> State:
        saved = checkpoint.load(self.folder, self.facts, self.moves.energy.device) if self.folder else None
        if saved is not None:
            state, kept = saved
            self.z, self.energy = kept["z"], kept["energy"]
            self.kept, self.seconds = int(kept["kept"]), float(kept["seconds"])
            return state
        q = self.model.posterior()
        chain = torch.arange(self.model.components, device=q.mean.device)
        noise = normals(address(self.settings.seed, Space.CHAIN_START, chain), self.model.nodes)
        return self.moves.start(q.draw(chain, noise).detach())

    def _keep(self, state: State) -> None:
        self.z[:, self.kept] = state.z.cpu()
        self.energy[:, self.kept] = self.settings.temperature * state.potential.cpu().double()
        self.kept += 1

    def _save(self, state: State) -> None:
        if self.folder is not None:
            numbers = {"kept": torch.tensor(self.kept), "seconds": torch.tensor(self.seconds, dtype=torch.float64)}
            checkpoint.save(self.folder, state, {"z": self.z, "energy": self.energy} | numbers, self.facts)

    def _samples(self, state: State) -> Samples:
        whole = self.settings.method == "hmc"
        steps = self.settings.total - self.settings.warmup
        return Samples(
            z=self.z,
            energy=self.energy,
            layers={name: latent.nodes for name, latent in self.model.latents.items()},
            settings=self.settings,
            step_size=float(state.step),
            acceptance=float(state.accepted) / steps if whole else None,
            divergent=int(state.divergent),
            seconds=self.seconds,
            unit_std=float(self.model.unit_std.max()),
        )


def _check_model(model: IBNN) -> None:
    """Raises unless a model has latents, and answers each row by itself."""
    if not isinstance(model, IBNN) or not model.latents:
        remedy = "Convert it first: sample(ibnn.convert(net), data)."
        raise TypeError(complaint("model", "an IBNN made by convert", type(model).__name__, remedy))
    norms = {name: m for name, m in model.net.named_modules() if isinstance(m, _BatchNorm)}
    if batchwise := [name for name, norm in norms.items() if norm.training or norm.running_mean is None]:
        expected = "a network whose likelihood is a product over rows"
        remedy = "Call model.eval(); BatchNorm without running statistics cannot be sampled."
        got = f"BatchNorm that normalises by the batch: {batchwise}"
        raise ValueError(complaint("model", expected, got, remedy))


def _check_data(source: Source) -> None:
    """Raises unless rows can be drawn at random, and there are any."""
    if not source.divisible:
        got, remedy = "a sampler or iterable of your own", "Pass the Dataset, or a pair (x, y)."
        raise TypeError(complaint("data", "data whose rows can be drawn at random", got, remedy))
    if source.rows < 2:
        remedy = "The posterior is nearly the prior: model.set_posterior(mean=1.0, std=model.prior_std)."
        raise ValueError(complaint("data", "two rows or more", source.rows, remedy))
