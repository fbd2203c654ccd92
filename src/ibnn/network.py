"""WHOLE: a converted network. Ties the component across layers; forward, KL, draws, plain networks back out."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ibnn import mixture, objective
from ibnn.draws import Draws
from ibnn.errors import complaint
from ibnn.inputs import Inputs, Pick, batch_length, call_arguments, check_rows, evaluating, repeat_rows, tree_map
from ibnn.latent import strip
from ibnn.layers.observe import explaining_shapes
from ibnn.layers.registry import duplicate, fold
from ibnn.layers.sides import BiasLatents, Where
from ibnn.layers.units import UnitFactors
from ibnn.likelihood import Likelihood
from ibnn.posterior import Posterior
from ibnn.prediction import predict

if TYPE_CHECKING:
    from ibnn.files import hub, saving

NUMBERS = ("prior_std", "gradient_scale")  # plain attributes that are part of the state
FACTORS = ("prior_factors", "unit_std")  # buffers that states from before did not have


class IBNN(Posterior):
    """An implicit Bayesian neural network: a plain network whose layers' inputs are multiplied by latents z.

    Made by `ibnn.convert`. In train mode a call runs Algorithm 1: the rows of the batch are spread evenly over the K
    components and every row has its own draw of z. In eval mode a call is deterministic and returns one output that
    stands for `eval_samples` fixed draws of every component.

    Attributes:
        net: The converted network; its weights keep their names.
        likelihood: What its output says about a target.
        logits: Which part of the network's output that is: a path, a function, or None for all of it.
        components: K.
        prior_std: s, standard deviation of the prior of every latent; like `gradient_scale` a plain number that is
            part of the state dict.
        prior_factors: Of each layer, (layers,), a buffer: its prior's standard deviation is s times this.
        draws: What a factor of a convolution's input is drawn for: "channel", "unit" or "both".
        where: Which nodes of layers have latents: those of their "input", their "output" or "both".
        bias_latents: Whether biases have latents: "none", one for each "layer", or one for each "node".
        unit_std: τ of each layer, (layers,), a buffer: standard deviation of the factors of single units.
        bank: Samples of z that are the posterior in place of the mixture, (K, S, nodes), a buffer (see `ibnn.sample`);
            None where there are none.
        kl_kind: Which KL `kl` and `elbo` use.
        eval_samples: Draws per component in eval mode; 0 stands for the K networks at the component means.
        eval_seed: Seed of those draws.
        gradient_scale: Factor on the latents' gradients; `parameter_groups` sets it to K.
        seed: Decides every draw of training (a buffer, so that it is saved).
        examples: How many training examples have been drawn for so far (a buffer); with `seed` it addresses the next
            draws, so a restored state dict goes on exactly where it stopped.
    """

    random = True  # there are draws
    if TYPE_CHECKING:  # `ibnn.files` gives the class these methods
        save_pretrained = saving.save_pretrained
        push_to_hub = hub.push_to_hub
        from_pretrained = staticmethod(hub.from_pretrained)

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        *,
        logits: Pick | None = None,
        where: Where = "input",
        bias_latents: BiasLatents = "none",
        **posterior: Any,
    ) -> None:
        """Wraps a network whose layers carry latents already; use `ibnn.convert`."""
        super().__init__(net, likelihood, **posterior)
        self.logits, self.where, self.bias_latents = logits, where, bias_latents
        self.eval_samples, self.eval_seed = 1, 0
        self.training = net.training  # of the modules in it, each keeps its own mode
        likelihood.train(net.training)

    # --------------------------------------------------------------------------------------------- forward passes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes what the network takes. Train mode: its output type. Eval mode: one tensor of its output's shape.

        Given `labels`, networks that return their loss (Hugging Face's) do so in eval mode too, for all draws together.
        """
        if self.training:
            rows = batch_length((args, kwargs))
            with self._unchanged_on_error():
                output = self._run((args, kwargs), self._training_draws(self.posterior(), rows))
            self.examples.add_(rows)
            return output
        means_only = self.eval_samples == 0
        z = Draws(self.posterior().mean) if means_only else self.draw_each(self.eval_samples, self.eval_seed)
        draws = self._all_outputs((args, kwargs), z)
        labelled = kwargs.get("labels") is not None and not torch.compiler.is_compiling()
        return self._with_loss((args, kwargs), z[0], draws) if labelled else self.likelihood.combine(draws)

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
        part: tuple[int, int] | None = None,
    ) -> objective.ELBO:
        """The loss of Algorithm 1 on a batch, and its terms.

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
        compiling = torch.compiler.is_compiling()  # a graph checks no values
        data = 1 if compiling else self.likelihood.count(y)
        objective.check_weights(n_data=n_data, data=data, samples=samples, beta=beta, gamma=gamma)
        rows = batch_length(x)
        if y.dim() == 0 or len(y) != rows:
            got = f"shape {tuple(y.shape)}"
            raise ValueError(complaint("y", f"of {rows} rows like x", got, "Pass a target for every row."))
        call = call_arguments(tree_map(lambda t: repeat_rows(t, rows, samples), x))
        q = self.posterior()
        with self._unchanged_on_error():
            z = self._training_draws(q, rows, samples, spread, part)
            with nullcontext() if compiling else explaining_shapes(self.net, x):
                output = self._read(self._run(call, z))
                check_rows(output, rows * samples)
            if not compiling:
                self.likelihood.check(output, y)
            terms = self.likelihood.terms(output, repeat_rows(y, rows, samples))
        kl = self._kl(q, self.kl_kind)
        entropy = mixture.entropy_bound(q) if gamma else torch.zeros_like(kl)
        if part is None:
            self.examples.add_(rows)
        return objective.elbo(terms, kl, entropy, n_data=n_data, beta=beta, gamma=gamma)

    def parameter_groups(
        self, lr: float, latent_lr: float | None = None, weight_decay: float = 0.0, *, undo_k: bool = True
    ) -> list[dict[str, Any]]:
        """Sets `gradient_scale`, and returns parameter groups for any torch optimiser.

        The groups are the weights, the latents (without weight decay) and the likelihood's own parameters, if it has
        any. The mean over a batch gives every component 1/K of its rows' gradient. `gradient_scale = K` undoes that
        from this call on, so that one learning rate serves any K; a state dict loaded later brings its own scale.

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

    # -------------------------------------------------------------------------------------------------- prediction

    predict = predict

    def draw_logits(
        self, x: Inputs, samples: int = 5, seed: int = 0, *, first: int = 0, batch_size: int | None = None
    ) -> Tensor:
        """Outputs of `samples` networks per component, (K·S, B, …), component-major, in eval mode.

        Row k·S + s is the network `draw(component=k, index=first + s, seed=seed)`, whatever the batch or `samples`.

        Args:
            x: What one call of the network takes.
            samples: S.
            seed: Decides the draws.
            first: Index of the first draw of every component.
            batch_size: Lets several draws for a few inputs pass as one batch of at most so many rows; faster, and equal
                up to rounding. None passes draw by draw.
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
        """Yields what `draw_logits` returns, some draws at a time, (J, B, …), so that they need not all be held.

        The model stays in eval mode, and locked for other threads, until the last one is taken or the iterator closed.
        """
        with self._lock, evaluating(self):
            z = self.draw_each(samples, seed, components=components, first=first)
            yield from self._each_output(call_arguments(x), z, batch_size)

    def mean_output(self, x: Inputs) -> Tensor:
        """Returns the output of one pass in the present mode, with every z at its posterior mean, over components."""
        return self._read(self._run(call_arguments(x), self.mean_latents()))

    def component(self, k: int) -> nn.Module:
        """The plain network at the mean of component k, W = U diag(μₖ), in eval mode: no trace of ibnn is left."""
        return self.folded(self.posterior().mean[self._component_index(k)])

    def draw(self, component: int, index: int = 0, seed: int = 0) -> nn.Module:
        """The network of one draw, in eval mode: it computes row component·S + index of `draw_logits`.

        It is a plain network, but that a layer whose units have factors has a module that multiplies its input.
        """
        if index < 0:
            raise IndexError(complaint("index", "0 or more", index, "Count draws from 0."))
        return self.folded(self.draw_each(1, seed, components=[self._component_index(component)], first=index)[0])

    def _component_index(self, k: int) -> int:
        if not 0 <= k < self.components:
            raise IndexError(complaint("component", f"in 0 … {self.components - 1}", k, "Count components from 0."))
        return k

    def folded(self, z: Tensor | Draws) -> nn.Module:
        """Returns a copy of the network with z (nodes,) multiplied into the weights and the latents removed."""
        draw = z if isinstance(z, Draws) else Draws(z)
        parts = self.by_layer(draw.z.detach())
        found = {name: (latent, part, own) for (name, latent, part), own in zip(parts, self._units(draw), strict=True)}
        net = duplicate(self.net).eval()
        for name, layer in strip(net):
            latent, part, units = found[name]
            fold(layer, part, name, latent.sides)
            if units is not None:
                layer.add_module("unit_factors", factors := UnitFactors(units.std, units.at, latent.axis))
                layer.register_forward_pre_hook(factors.hook, with_kwargs=True)
        return net

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Adds the numbers of the state as the bits of a double, in an integer: some devices have no float64."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in NUMBERS:
            destination[prefix + name] = torch.tensor(float(getattr(self, name)), dtype=torch.float64).view(torch.int64)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """States without the numbers, from before they were part of it, leave the present ones."""
        older = {"prior_factors": torch.ones_like(self.prior_factors), "unit_std": torch.zeros_like(self.unit_std)}
        self.expect_bank(state_dict, prefix)
        for name in FACTORS:
            state_dict.setdefault(prefix + name, older[name])
        loaded = state_dict[prefix + "unit_std"]
        if self.draws == "channel" and not loaded.is_meta and bool(loaded.any()):
            remedy = 'Convert it with draws="both" (or "unit"), as the saved one was.'
            expected = "of a model whose units have no noise, as this one"
            raise ValueError(complaint("state_dict", expected, "one with unit_std above 0", remedy))
        for name in NUMBERS:
            if (found := state_dict.pop(prefix + name, None)) is not None:
                setattr(self, name, float(found if found.is_floating_point() else found.cpu().view(torch.float64)))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """What `print` shows of the model."""
        elsewhere = f", where={self.where!r}, bias_latents={self.bias_latents!r}"
        return (
            f"components={self.components}, nodes={self.nodes}, prior_std={self.prior_std}, kl={self.kl_kind!r}, "
            f"draws={self.draws!r}, "
            f"eval_samples={self.eval_samples}, eval_seed={self.eval_seed}"
            f"{elsewhere if (self.where, self.bias_latents) != ('input', 'none') else ''}"
        )
