"""A converted network: a mixture over the nodes of all its layers, and forward passes with its draws.

The component of a draw is tied across layers: a component is one whole network. Draws come from `draws`, their KL from
`mixture`, the division of noise among layers from `noise`. `IBNN._run` gives every layer its part of a draw, and
`Latent.run` multiplies the layer's input by it.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn import check, draws, inputs, mixture, noise, objective
from ibnn.draws import Draw, Draws
from ibnn.errors import complaint
from ibnn.inputs import Call, Inputs, Pick
from ibnn.latent import Latent, Pass, runs, strip
from ibnn.layers.batch_axis import find_batch
from ibnn.layers.bypass import bypassed
from ibnn.layers.explain import explain
from ibnn.layers.registry import duplicate, fold
from ibnn.likelihood import Categorical, Likelihood
from ibnn.mixture import KLKind, Mixture
from ibnn.noise import DrawsPer
from ibnn.normal import Space, address, normals
from ibnn.prediction import HeldOut, predict
from ibnn.threads import Lock, deepcopy, one_at_a_time
from ibnn.units import UnitFactors, Units

if TYPE_CHECKING:
    from ibnn.files import saving
    from ibnn.novelty.reference import Reference

NUMBERS = ("prior_std", "gradient_scale")  # plain attributes that are part of the state
STATE = (*NUMBERS, "prior_factors", "unit_std")  # what the state holds besides weights, latents and counters
OF_NETWORK = {"config", "device", "dtype", "generation_config", "loss_type", "main_input_name"}  # the model's, too
FUNCTIONS = {"fit", "calibrate", "export", "prune", "sample", "diagnose", "fit_novelty"}  # of a model, no methods
FEW_ROWS = 16  # rows of a batch that is worth repeating for several draws at once
SMALL_PASS = 2**18  # entries of a pass that computes so little that Python's calls matter: it is worth repeating, too
CACHE_ENTRIES = 2**24  # entries of the rows of one pass that caches hold; more of them would go through memory
_SEARCHES = 4  # for the batch in inputs that are folded differently from those before


class IBNN(nn.Module):
    """An implicit Bayesian neural network: a plain network whose layers' inputs are multiplied by latents z.

    Made by `ibnn.convert`. In train mode a call runs Algorithm 1: the rows of the batch are spread evenly over the K
    components and every row has its own draw of z. In eval mode a call is deterministic. For a classifier it returns
    the log of the mean probabilities over `eval_samples` fixed draws of every component. Threads may share a model:
    its passes come one after the other, each in the caller's mode; not with gradient checkpointing, whose backward
    pass runs layers.

    Attributes:
        net: The converted network; its weights keep their names.
        likelihood: What its output, or the part of it that `logits` picks, says about a target.
        latents: Latents by the name of their layer, in the order of the nodes.
        components: K.
        prior_std: s, standard deviation of the prior of every latent.
        prior_factors: Factors on s, one for each layer, (layers,).
        draws, where, bias_latents: As given to `ibnn.convert`.
        unit_std: τ of each layer, (layers,): standard deviation of the factors of single units.
        bank: Samples of z that replace the mixture as posterior, (K, S, nodes), see `ibnn.sample`; or None.
        kl_kind: Which KL `kl` and `elbo` use.
        eval_samples: Draws per component in eval mode; 0 stands for the K networks at the component means.
        eval_seed: Seed of those draws.
        gradient_scale: Factor on the latents' gradients; `parameter_groups` sets it to K.
        seed: Decides every draw of training.
        examples: How many training examples have received draws so far: the address of the next draws.
        reference: Statistics of known inputs (see `ibnn.fit_novelty`); None without them, and after more training.
        held_out: Distances of held-out targets from answers (see `ibnn.conformalize`); None without them, and after any
            change of the posterior.
    """

    seed: Tensor
    examples: Tensor
    prior_factors: Tensor
    unit_std: Tensor
    bank: Tensor | None
    reference: "Reference | None"
    held_out: HeldOut | None

    evaluating, __deepcopy__ = inputs.evaluating, deepcopy
    train = one_at_a_time(nn.Module.train)
    state_dict = one_at_a_time(nn.Module.state_dict)
    load_state_dict = one_at_a_time(nn.Module.load_state_dict)

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        *,
        components: int,
        prior_std: float,
        init_std: float,
        kl_kind: KLKind,
        seed: int,
        draws: DrawsPer = "channel",
        logits: Pick | None = None,
        where: str = "input",
        bias_latents: str = "none",
    ) -> None:
        """Wraps a network whose layers carry latents already; use `ibnn.convert`."""
        super().__init__()
        self._lock = Lock()
        self.net, self.likelihood, self.logits = net, likelihood, logits
        self.components, self.prior_std, self.kl_kind = components, prior_std, kl_kind
        self.where, self.bias_latents, self.random = where, bias_latents, True
        self.eval_samples, self.eval_seed, self.gradient_scale = 1, 0, 1.0
        self.latents = {name.rpartition(".")[0]: m for name, m in net.named_modules() if isinstance(m, Latent)}
        self._pass = Pass()
        for number, latent in enumerate(self.latents.values()):
            latent.current_pass, latent.number = self._pass, number
        self.draws: DrawsPer = draws if any(latent.placed for latent in self.latents.values()) else "channel"
        self._layers_of_units = 0 if self.draws == "channel" else len(self.latents)  # that have words in a draw
        self._checked: set[tuple[bool, bool]] = set()  # (mode, a z each row) in which the layers' calls were checked
        self._searches = 0  # for the batch in layers' inputs
        self._targets_checked = False
        self._entries_per_value: float | None = None  # of a draw as rows; 0 if rows affect each other, None if unknown
        device, ones, zero = next(net.parameters()).device, torch.ones(len(self.latents)), torch.tensor(0)
        for name, start in (("unit_std", 0 * ones), ("seed", zero), ("examples", zero), ("prior_factors", ones)):
            self.register_buffer(name, start.to(device, copy=True))
        self.register_buffer("bank", None)
        self.register_module("reference", None)
        self.register_module("held_out", None)
        self.init_seed = seed  # decided the latents' start
        self.fresh = False
        self.reseed(seed)
        mean, std = noise.initial(self, init_std)
        self.set_posterior(mean=mean, std=std, unit_std=noise.START)
        self.fresh = True  # until the latents are trained, calibrated, set or loaded: `predict` says so once
        self._pass.at_mean = False  # the start's means are noise around the given network
        self.training = net.training  # of the modules in it, each keeps its own mode
        likelihood.train(net.training)

    @property
    def nodes(self) -> int:
        """Number of latent variables of one draw, over all layers."""
        return sum(latent.nodes for latent in self.latents.values())

    def __getattr__(self, name: str) -> Any:
        """Finds some attributes of a Hugging Face network on the model, and says where the library's functions are."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            net = self.__dict__.get("_modules", {}).get("net")
            if name in OF_NETWORK and hasattr(net, name):
                return getattr(net, name)
            if name == "generate" and hasattr(net, name):
                from ibnn.transformers import generate

                return functools.partial(generate, self)
            if name == "save":
                raise AttributeError("A model has no method 'save': model.save_pretrained(folder).") from error
            if name in FUNCTIONS:
                raise AttributeError(f"{name!r} is a function, not a method: ibnn.{name}(model, …).") from error
            raise

    # --------------------------------------------------------------------------------------------------- posterior

    def posterior(self) -> Mixture:
        """Returns the mixture over the nodes of all layers, (K, nodes); gradients come back times `gradient_scale`."""
        latents = list(self.latents.values())
        if not latents:
            raise RuntimeError("This model was reverted: its network has no latents. Convert it again.")
        mean, rho = torch.cat([latent.mean for latent in latents], 1), torch.cat([latent.rho for latent in latents], 1)
        std, scale = F.softplus(rho), self.gradient_scale  # σ as a `Latent` has it
        for part in (mean, std):
            if scale != 1.0 and part.requires_grad:
                part.register_hook(lambda gradient: gradient * scale)
        return Mixture(mean, std)

    def set_posterior(
        self,
        *,
        mean: Tensor | float | None = None,
        std: Tensor | float | None = None,
        unit_std: Tensor | float | None = None,
    ) -> None:
        """Overwrites μ, σ or τ with a number, or with a tensor that broadcasts to (K, nodes), or (layers,) for τ.

        A bank is dropped: draws come from the mixture again, whose μ and σ are the bank's where they are not given.
        `set_posterior(mean=1.0, std=0.0)` switches all noise off: every component is the network before conversion.
        """
        if isinstance(unit_std, Tensor) and unit_std.dim():
            check.shape("unit_std", unit_std, tuple(self.unit_std.shape), remedy="Pass one for each layer.")
        for name, value in (("std", std), ("unit_std", unit_std)):
            if value is not None and not bool((torch.as_tensor(value) >= 0).all()):
                raise ValueError(complaint(name, "not negative", value, "Pass 0 for no noise."))
        if unit_std is None and std is not None and not bool(torch.as_tensor(std).any()):
            unit_std = 0.0
        given = {name: value for name, value in (("mean", mean), ("std", std)) if value is not None}
        shape = (self.components, self.nodes)
        parts = {name: by_layer(self, torch.as_tensor(value).expand(shape)) for name, value in given.items()}
        before, self.bank = self.posterior().mean.detach(), None
        for name, layers in parts.items():
            for _, latent, part in layers:
                latent.set(**{name: part})
        if unit_std is not None:
            self.unit_std.copy_(torch.as_tensor(unit_std).to(self.unit_std) * noise.has_units(self))
        self._forget(answers_alone=torch.equal(self.posterior().mean, before))

    def set_bank(self, z: Tensor) -> None:
        """Makes samples of z, (K, S, nodes), the posterior: draws are rows of them, without factors of units.

        μ and σ of component k become the moments of chain k; `set_posterior()` goes back to that mixture.
        """
        check.shape("z", z, (self.components, "samples", self.nodes), remedy="Pass a chain for each component.")
        if not z.shape[1] or not bool(z.isfinite().all()):
            raise ValueError(complaint("z", "of one sample or more, all finite", "others", "Leave those out."))
        z = z.detach().to(self.posterior().mean)
        self.set_posterior(mean=z.mean(1), std=z.std(1, correction=0), unit_std=self.unit_std.clone())
        self.bank = z.clone()

    def reseed(self, seed: int) -> None:
        """Starts the draws of training anew from a seed."""
        check.seed(seed)
        self.seed.fill_(seed)
        self.examples.zero_()

    def kl(self, kind: KLKind | None = None, q: Mixture | None = None) -> Tensor:
        """KL of the posterior to the prior in nats, summed over nodes and layers. Divide by the training-set size only.

        Args:
            kind: "mean" (the paper's surrogate), "components" or "pairwise" (upper bounds: β = 1 gives a true lower
                bound of the evidence), or "montecarlo" (unbiased, one draw per component); default `kl_kind`.
            q: What `posterior` returned, if it is at hand.
        """
        kind, q = kind or self.kl_kind, q or self.posterior()
        if kind == "montecarlo":
            row = torch.arange(self.components, device=self.examples.device)
            eps = normals(address(self.seed, Space.KL, self.examples, row), self.nodes)
            return mixture.kl_montecarlo(q, prior_stds(self), eps)
        if kind not in mixture.CLOSED_FORMS:
            check.choice("kind", kind, get_args(KLKind))
        return mixture.CLOSED_FORMS[kind](q, prior_stds(self))

    def draw_latents(
        self, samples: int = 5, seed: int = 0, *, components: Sequence[int] | None = None, first: int = 0
    ) -> Draws:
        """Returns the draws that `predict` makes, z (K·S, nodes), component-major; see `draws.predictive` and `banked`.

        `components` are some of them, default all; `first` is the index of the first of the S draws of each.
        """
        chosen = range(self.components) if components is None else components
        if not len(chosen) or not all(0 <= k < self.components for k in chosen):
            some = f"some of 0 … {self.components - 1}"
            raise IndexError(complaint("components", some, list(chosen), "Count from 0, or leave them out for all."))
        if not torch.compiler.is_compiling():
            check.integer("seed", seed, least=-(2**63), most=2**63 - 1)
        if self.bank is not None:
            return draws.banked(self.bank, seed, components=chosen, samples=samples, first=first)
        options: Any = {"components": chosen, "samples": samples, "first": first}
        return draws.predictive(self.posterior(), seed, **options, layers=self._layers_of_units)

    def _training_draws(
        self, q: Mixture, rows: int, samples: int = 1, spread: bool = False, part: draws.Part | None = None
    ) -> Draw:
        require_mixture(self)
        options: Any = {"rows": rows, "samples": samples, "spread": spread, "part": part}
        return draws.training(q, self.seed, self.examples, **options, layers=self._layers_of_units)

    def _forget(self, *, answers_alone: bool = False) -> None:
        """Drops what held-out data showed: the answers are about to change, and the weights unless `answers_alone`."""
        if torch.compiler.is_compiling() or self.fresh:  # assigning is slow; a compiled graph must not branch on it
            self.fresh = False
        if self.held_out is not None:
            self.held_out = None
        if not answers_alone:
            self._pass.at_mean = True
            if self.reference is not None:
                self.reference = None

    # ---------------------------------------------------------------------------------------------- forward passes

    @one_at_a_time  # the mode is that of the caller, not of a prediction in another thread
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes what the network takes. Train mode: its output type. Eval mode: one tensor of its output's shape.

        Given `labels`, networks that return their loss (Hugging Face's) return the NLL of all draws in eval mode.
        """
        call = (args, kwargs)
        if self.training:
            rows = inputs.batch_length(call)
            self._forget()
            output = self._run(call, self._training_draws(self.posterior(), rows))
            self.examples.add_(rows)
            return output
        samples = self.eval_samples
        drawn = self.draw_latents(samples, self.eval_seed) if samples else Draws(self.posterior().mean)
        outputs = torch.cat(list(self._each_output(call, drawn)))
        combined = self.likelihood.combine(outputs)
        if kwargs.get("labels") is None or torch.compiler.is_compiling():
            return combined
        output = self._run(call, drawn[0])
        if not isinstance(output, MutableMapping) or output.get("loss") is None or self.logits is not None:
            return combined  # labels are an input like others
        sums, counts = self.likelihood.losses(outputs[None], self.likelihood.pack(kwargs["labels"]))
        output["loss"], output["logits"] = (sums.sum() / counts.sum()).to(outputs), combined
        return output

    def outputs(self, x: Inputs, z: Tensor | Draws, batch_size: int | None = None) -> Tensor:
        """Returns the outputs of the network in its present mode for given latents, (J, B, …).

        Args:
            x: What one call of the network takes, of B rows.
            z: J draws of the latents, (J, nodes); or (J, B, nodes), a draw for each row.
            batch_size: Lets several draws for a few inputs pass as one batch of at most this many rows.
        """
        drawn = z if isinstance(z, Draws) else Draws(z)
        return torch.cat(list(self._each_output(inputs.call_arguments(x), drawn, batch_size)))

    def _each_output(self, call: Call, drawn: Draws, batch_size: int | None = None) -> Iterator[Tensor]:
        """Yields what `outputs` returns, some draws at a time."""
        rows = inputs.batch_length(call)
        each_row = drawn.z.dim() == 3
        most = 1 if each_row or self.training else min((batch_size or 0) // rows, len(drawn))
        at_once = self._draws_at_once(call, drawn[0], most) if most > 1 else 1
        if at_once > 1:
            first, *rest = drawn.split(at_once)
            try:
                output = self._rows_of_draws(call, first, rows)
            except ValueError:  # a layer does not see the batch, or the network takes no batch of this length
                pass
            else:
                yield output
                yield from (self._rows_of_draws(call, part, rows) for part in rest)
                return
        yield from (self._read(self._run(call, drawn[number]))[None] for number in range(len(drawn)))

    def _rows_of_draws(self, call: Call, drawn: Draws, rows: int) -> Tensor:
        """Returns the outputs of J draws from one forward pass on J copies of the batch."""
        count = len(drawn)
        repeated = inputs.tree_map(lambda tensor: inputs.repeat_rows(tensor, rows, count), call)
        output = self._read(self._run(repeated, drawn.as_rows(rows)))
        return output.reshape(count, rows, *output.shape[1:])

    def _draws_at_once(self, call: Call, draw: Draw, most: int) -> int:
        """Returns how many draws pass as rows of one batch: several if rows are few, or the network computes little.

        At first two draws run both ways on two rows: where rows affect each other, draws pass one by one.
        """
        rows = inputs.batch_length(call)
        if self._entries_per_value is None:
            two, self._entries_per_value = inputs.slice_rows(call, slice(0, 2), rows), 0.0
            words = None if draw.words is None else torch.stack([draw.words, draw.words + 1])
            pair = Draws(torch.stack([draw.z, 1.5 * draw.z]), words, draw.unit_std)  # two that differ, whatever σ
            try:
                expected = torch.cat([self._read(self._run(two, pair[number]))[None] for number in (0, 1)])
                output = self._rows_of_draws(two, pair, inputs.batch_length(two))
            except (ValueError, RuntimeError, IndexError):  # the batch is not first, or has one length only
                return 1
            if bool((output - expected).abs().max() <= torch.finfo(output.dtype).eps ** 0.5 * expected.abs().max()):
                values = sum(tensor.numel() for tensor in inputs.tensors(two))
                self._entries_per_value = max(output.numel(), self._pass.entries) / 2 / values
        entries = int(self._entries_per_value * sum(tensor.numel() for tensor in inputs.tensors(call)))
        if not entries or (rows > FEW_ROWS and entries > SMALL_PASS):
            return 1
        return min(most, max(CACHE_ENTRIES // entries, 1))

    def _read(self, output: Any) -> Tensor:
        """Returns the tensor in the network's output that the likelihood is about."""
        return self.likelihood.read(output if self.logits is None else inputs.pick(output, self.logits))

    def _run(self, call: Call, draw: Draw) -> Any:
        """Runs the network once with the z of a draw."""
        (args, kwargs), current, each_row = call, self._pass, draw.z.dim() == 2
        z, units = [part for _, _, part in by_layer(self, draw.z)], self._units(draw)
        if torch.compiler.is_compiling():
            with current.multiplying(z, units):
                return self.net(*args, **kwargs)
        with self._lock, no_fast_path():
            if each_row and not self._searches:
                self._search(call)
            first = (self.training, each_row) not in self._checked
            again = functools.partial(self._search_again, call) if each_row else None
            with current.multiplying(z, units, again), self._checking() if first else nullcontext():
                output = self.net(*args, **kwargs)
            self._checked.add((self.training, each_row))
        if torch.is_grad_enabled():
            for tensor in inputs.tensors(output):
                if tensor.requires_grad:  # its gradient comes first, before any layer is run again (checkpointing)
                    tensor.register_hook(functools.partial(current.remember, z, units))
        return output

    def _units(self, drawn: Draw | Draws) -> list[Units | None]:
        """Returns the unit factors of every layer."""
        words = drawn.words
        if words is None:
            return [None] * len(self.latents)
        # A clone: the backward pass makes the noise again, and τ may have been set anew by then.
        stds = (self.unit_std.clone() if drawn.unit_std is None else drawn.unit_std).unbind()
        latents = enumerate(self.latents.values())
        return [Units(stds[n], words[..., n]) if latent.placed else None for n, latent in latents]

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """Raises if the network reads weights of converted layers past their latents in the block."""
        layers = {name: self.net.get_submodule(name) for name in self.latents}
        if replaced := [name for name, layer in layers.items() if not runs(layer, self.latents[name])]:
            raise RuntimeError(f"The forward of {replaced}, which has the latents, was replaced. Do so before convert.")
        with bypassed(self.net, self.latents) as names:
            yield
        if names:
            got = f"one that reads the weight of {sorted(names)} directly, past their latents"
            remedy = f"Leave them out: convert(..., exclude={sorted(names)})."
            raise RuntimeError(complaint("net", "a network that calls the layers it converts", got, remedy))

    def _search(self, call: Call) -> None:
        """Finds out where layers see the batch, but not under torch.func, where shapes are those of single rows."""
        if torch._C._functorch.peek_interpreter_stack() is None:
            find_batch(self.net, self.latents, call)
            self._searches += 1

    def _search_again(self, call: Call, latent: Latent, times: int) -> None:
        """Lets a layer see `times` entries for each row; searches for the batch again the first few times."""
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())  # others would wait
        if alone and self._searches < _SEARCHES:
            self._search(call)
        latent.entries_per_row |= {times}

    # --------------------------------------------------------------------------------------------------- training

    def elbo(
        self,
        x: Inputs,
        y: Any,
        *,
        n_data: int,
        samples: int = 1,
        beta: float = 1.0,
        gamma: float = 0.0,
        spread: bool = False,
        part: draws.Part | None = None,
    ) -> objective.ELBO:
        """Returns the loss of Algorithm 1 on a batch, and its terms.

        Args:
            x: What one call of the network takes: a tensor, a tuple (positional) or a dict (by keyword).
            y: The targets: a tensor, or a dict of them for a network with several heads.
            n_data: N, the number of targets in the training set: of a segmentation every pixel is one, of a language
                model every token, of several heads the targets of each.
            samples: S, how many copies of every example there are, each with its own draw of z.
            beta: Weight of the KL.
            gamma: Weight of the posterior's entropy, which keeps components apart and wide.
            spread: Sends the copies of an example to different components (the authors' code) and not to one.
            part: (where x begins, rows of the whole) in a larger batch whose other parts are computed elsewhere, on
                other workers or in turn; components and draws are then those of the whole batch. The caller adds the
                whole batch's rows to `examples` once all parts are done.
        """
        y = self.likelihood.pack(y)
        # Values are checked at every step where that is free, else once: reading them would stop a GPU's queue.
        checks = not torch.compiler.is_compiling() and (y.device.type == "cpu" or not self._targets_checked)
        data = self.likelihood.count(y) if checks else 1
        if not torch.compiler.is_compiling():
            objective.check_weights(n_data=n_data, data=data, samples=samples, beta=beta, gamma=gamma)
        rows = inputs.batch_length(x)
        if y.dim() == 0 or len(y) != rows:
            got = f"shape {tuple(y.shape)}"
            raise ValueError(complaint("y", f"of {rows} rows like x", got, "Pass a target for every row."))
        call = inputs.call_arguments(
            x if samples == 1 else inputs.tree_map(lambda t: inputs.repeat_rows(t, rows, samples), x)
        )
        q = self.posterior()
        drawn = self._training_draws(q, rows, samples, spread, part)
        try:
            output = self._read(self._run(call, drawn))
            inputs.check_rows(output, rows * samples)
        except (RuntimeError, IndexError, ValueError) as error:
            explain(error, self.net, x)
            raise
        if checks:
            self.likelihood.check(output, y)
            if isinstance(self.likelihood, Categorical):
                self.likelihood.refuse_shifted(next(inputs.tensors(x)), y)
            self._targets_checked = True
        self._forget()
        terms = self.likelihood.terms(output, y if samples == 1 else inputs.repeat_rows(y, rows, samples))
        kl = self.kl(q=q)
        entropy = mixture.entropy_bound(q) if gamma else torch.zeros_like(kl)
        if part is None:
            self.examples.add_(rows)
        return objective.ELBO(terms.loss + (beta * kl - gamma * entropy) / n_data, terms.nll, kl, entropy)

    def parameter_groups(
        self, lr: float, latent_lr: float | None = None, weight_decay: float = 0.0, *, undo_k: bool = True
    ) -> list[dict[str, Any]]:
        """Sets `gradient_scale`, and returns groups for any torch optimiser: weights, latents, likelihood.

        The mean over a batch gives every component 1/K of its rows' gradient. `gradient_scale = K` undoes that from
        this call on, so that one learning rate serves any K; a state dict loaded later brings its own scale.

        Args:
            lr: Learning rate of the weights, and of the likelihood's parameters.
            latent_lr: Learning rate of the latents; default `lr`.
            weight_decay: Of the weights alone.
            undo_k: False leaves the factor 1/K in place, for rates that allow for it (the paper's λ1).
        """
        self.gradient_scale = float(self.components) if undo_k else 1.0
        latent_lr = lr if latent_lr is None else latent_lr
        latents = {id(p): p for latent in self.latents.values() for p in latent.parameters()}
        weights = [p for p in self.net.parameters() if id(p) not in latents]
        groups = [
            {"name": "weights", "params": weights, "lr": lr, "weight_decay": weight_decay},
            {"name": "latents", "params": list(latents.values()), "lr": latent_lr, "weight_decay": 0.0},
            {"name": "likelihood", "params": list(self.likelihood.parameters()), "lr": lr, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    # ------------------------------------------------------------------------------------------------- prediction

    predict = predict

    def draw_logits(
        self, x: Inputs, samples: int = 5, seed: int = 0, *, first: int = 0, batch_size: int | None = None
    ) -> Tensor:
        """Returns outputs of `samples` networks per component, (K·S, B, …), component-major, in eval mode.

        Row k·S + s is the network `draw(component=k, index=first + s, seed=seed)`, whatever the batch or `samples`.
        With a `batch_size`, several draws for a few inputs pass as one batch of at most so many rows.
        """
        return torch.cat(list(self.each_draw(x, samples, seed, first=first, batch_size=batch_size)))

    def each_draw(
        self,
        x: Inputs,
        samples: int = 5,
        seed: int = 0,
        *,
        first: int = 0,
        batch_size: int | None = None,
        components: Sequence[int] | None = None,
    ) -> Iterator[Tensor]:
        """Yields what `draw_logits` returns, some draws at a time, (J, B, …); holds the model in eval mode."""
        with self.evaluating():
            call, drawn = inputs.call_arguments(x), self.draw_latents(samples, seed, components=components, first=first)
            yield from self._each_output(call, drawn, batch_size)

    def mean_output(self, x: Inputs) -> Tensor:
        """Returns the output of one pass in the present mode, with every z at its posterior mean, over components."""
        return self._read(self._run(inputs.call_arguments(x), Draw(mean_latents(self))))

    def component(self, k: int) -> nn.Module:
        """Returns the plain network at the mean of component k, W = U diag(μₖ), in eval mode."""
        if not 0 <= k < self.components:
            raise IndexError(complaint("k", f"in 0 … {self.components - 1}", k, "Count components from 0."))
        return folded(self, Draw(self.posterior().mean[k]))

    def draw(self, component: int, index: int = 0, seed: int = 0) -> nn.Module:
        """Returns the network of one draw, in eval mode; modules multiply the inputs of layers with unit factors."""
        if index < 0:
            raise IndexError(complaint("index", "0 or more", index, "Count draws from 0."))
        return folded(self, self.draw_latents(1, seed, components=[component], first=index)[0])

    # ------------------------------------------------------------------------------------------------------- state

    def save_pretrained(
        self,
        directory: "saving.Folder",
        *,
        latents_only: bool = False,
        architecture: "saving.Architecture | None" = None,
    ) -> None:
        """Writes the model into a folder that `ibnn.load` reads; see `ibnn.files.saving.save_pretrained`."""
        from ibnn.files.saving import save_pretrained

        save_pretrained(self, directory, latents_only=latents_only, architecture=architecture)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Adds the numbers of the state as the bits of a double, in an integer: some devices have no float64."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in NUMBERS:
            destination[prefix + name] = torch.tensor(float(getattr(self, name)), dtype=torch.float64).view(torch.int64)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        make_room(self, state_dict, prefix)
        loaded = state_dict.get(prefix + "unit_std")
        if self.draws == "channel" and loaded is not None and not loaded.is_meta and bool(loaded.any()):
            remedy = 'Convert it with draws="both" (or "unit"), as the saved one was.'
            raise ValueError(complaint("state_dict", 'one of draws="channel"', "unit_std above 0", remedy))
        for name in NUMBERS:
            if (found := state_dict.pop(prefix + name, None)) is not None:
                setattr(self, name, float(found if found.is_floating_point() else found.cpu().view(torch.float64)))
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._pass.at_mean = True

    def extra_repr(self) -> str:
        """What `print` shows of the model."""
        shown: dict[str, Any] = {n: getattr(self, n) for n in ("components", "nodes", "prior_std", "kl_kind", "draws")}
        stds = [latent.std.detach().flatten() for latent in self.latents.values()]
        shown |= {"mean_std": round(float(torch.cat(stds).mean()), 4)} if stds else {}
        shown |= {"temperature": round(float(self.likelihood.temperature), 4), "eval_samples": self.eval_samples}
        if (self.where, self.bias_latents) != ("input", "none"):
            shown |= {"where": self.where, "bias_latents": self.bias_latents}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class _FastPath:
    """Torch's flag of fused attention, one for the process, and how many blocks want it off."""

    lock, blocks, before = threading.Lock(), 0, True


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Disables torch's fused attention, which reads weights past their layers, while any thread is in such a block."""
    with _FastPath.lock:
        if not _FastPath.blocks:
            _FastPath.before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _FastPath.blocks += 1
    try:
        yield
    finally:
        with _FastPath.lock:
            _FastPath.blocks -= 1
            if not _FastPath.blocks:
                torch.backends.mha.set_fastpath_enabled(_FastPath.before)


def folded(model: IBNN, draw: Draw) -> nn.Module:
    """Returns a copy of the network with z (nodes,) multiplied into the weights and the latents removed."""
    units = model._units(draw)
    parts = {name: (latent, part) for name, latent, part in by_layer(model, draw.z.detach())}
    net = duplicate(model.net).eval()
    for name, layer in strip(net):
        latent, part = parts[name]
        fold(layer, part, name, latent.folded)
        if (own := units[latent.number]) is not None:
            layer.add_module("unit_factors", factors := UnitFactors(own.std, own.words, latent.axis))
            layer.register_forward_pre_hook(factors.hook, with_kwargs=True)
    return net


def by_layer(model: IBNN, values: Tensor) -> list[tuple[str, Latent, Tensor]]:
    """Returns every layer's name, its latent, and its part of values (…, nodes)."""
    parts = values.split([latent.nodes for latent in model.latents.values()], dim=-1)
    return [(name, latent, part) for (name, latent), part in zip(model.latents.items(), parts, strict=True)]


def by_node(model: IBNN, factors: Tensor) -> Tensor:
    """Returns factors of layers' inputs (layers,) for every node, (nodes,): latents of outputs and biases have 1."""
    parts = []
    for latent, factor in zip(model.latents.values(), factors.unbind(), strict=True):
        parts += [factor.expand(latent.inputs), factors.new_ones(latent.nodes - latent.inputs)]
    return torch.cat(parts)


def prior_stds(model: IBNN) -> Tensor | float:
    """Returns the standard deviation of every node's prior, (nodes,): s times its layer's factor; s if all are 1."""
    return model.prior_std if model.draws == "channel" else model.prior_std * by_node(model, model.prior_factors)


def mean_latents(model: IBNN) -> Tensor:
    """Returns the posterior mean of every latent, over components, (nodes,)."""
    return torch.cat([latent.mean.mean(0) for latent in model.latents.values()])


def require_mixture(model: IBNN) -> None:
    """Raises if there is a bank, which what comes next would not change along with the mixture."""
    if model.bank is not None:
        remedy = "Call model.set_posterior() to go on from the mixture of the bank's moments."
        raise ValueError(complaint("model", "one whose posterior is a mixture", "a bank of samples", remedy))


SETTINGS = ("kl_kind", "prior_std", "gradient_scale", "eval_samples", "eval_seed", "reference", "held_out", "fresh")


def snapshot(model: Any) -> Callable[[], None]:
    """Returns a function that puts latents, noise, likelihood and settings of a model back as they are now."""
    settings = {name: getattr(model, name) for name in SETTINGS if hasattr(model, name)}
    at_mean = model._pass.at_mean if isinstance(model, IBNN) else False
    latents = [f"{name}." for name, module in model.named_modules() if isinstance(module, Latent)]
    kept = (*latents, "examples", "seed", "unit_std", "prior_factors", "likelihood.")

    def tensors() -> dict[str, Tensor]:
        named = (*model.named_parameters(), *model.named_buffers())
        return {name: tensor for name, tensor in named if name.startswith(kept)}

    before = {name: tensor.detach().clone() for name, tensor in tensors().items()}

    @torch.no_grad()
    def restore() -> None:
        for name, value in settings.items():
            setattr(model, name, value)
        for name, tensor in tensors().items():
            tensor.copy_(before[name])
        if isinstance(model, IBNN):
            model._pass.at_mean = at_mean

    return restore


def make_room(model: Any, state_dict: Mapping[str, Any], prefix: str = "") -> None:
    """Makes room for bank, reference and held-out distances in a state to be loaded; one without them leaves none."""
    device = next(model.net.parameters()).device
    if hasattr(model, "bank"):
        bank = state_dict.get(f"{prefix}bank")
        model.bank = None if bank is None else torch.empty_like(bank, device=device)
    model.reference = model.held_out = None
    model.fresh = False
    if any(name.startswith(f"{prefix}held_out.") for name in state_dict):
        model.held_out = HeldOut.like(state_dict, f"{prefix}held_out.").to(device)
    if any(name.startswith(f"{prefix}reference.") for name in state_dict):
        from ibnn.novelty.reference import Reference

        model.reference = Reference.like(state_dict, f"{prefix}reference.").to(device)
