"""PASSES: runs a network whose layers carry latents with given z: one for all rows, one each, or many in turn."""

import functools
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.inputs import (
    Call,
    Inputs,
    Pick,
    batch_length,
    call_arguments,
    evaluating,
    pick,
    repeat_rows,
    tensors,
    tree_map,
)
from ibnn.latent import Latent, backward_pass
from ibnn.layers.attention import no_fast_path
from ibnn.layers.observe import bypassed, find_batch, returned
from ibnn.layers.registry import foldable
from ibnn.layers.units import Units
from ibnn.likelihood import Categorical, Likelihood
from ibnn.novelty.observer import Observer

FEW = 16  # rows of a batch that is worth repeating for several draws at once
LITTLE = 2**18  # entries of a pass that computes so little that Python's calls matter: it is worth repeating, too
CACHED = 2**24  # entries of the rows of one pass that caches hold; more of them would go through memory
_SMALL = 2**16  # entries of a buffer that is worth a copy at every step
_SEARCHES = 4  # for the batch in inputs that are folded differently from those before


class Draws:
    """What layers' inputs are multiplied by: some draws, or one.

    Attributes:
        z: Factors of the nodes: (J, nodes), J draws; (J, B, nodes), each with a z for every row; or one of these.
        at: Words that the factors of single units come from, (…, layers); None if units have none.
        unit_std: τ of each layer, (layers,), if not the network's own.
    """

    def __init__(self, z: Tensor, at: Tensor | None = None, unit_std: Tensor | None = None) -> None:
        self.z, self.at, self.unit_std = z, at, unit_std

    def __len__(self) -> int:
        return self.z.shape[0]

    def __getitem__(self, index: int | slice) -> "Draws":
        return Draws(self.z[index], None if self.at is None else self.at[index], self.unit_std)

    def split(self, size: int) -> "list[Draws]":
        """Returns at most so many draws at a time, nearly as many each time."""
        size = -(-len(self) // -(-len(self) // size))
        return [self[first : first + size] for first in range(0, len(self), size)]

    def each_row(self, rows: int) -> "Draws":
        """Returns draws (J, …) as a z for each row of J copies of a batch."""
        at = self.at
        at = None if at is None else at.repeat_interleave(rows, 0)
        return Draws(self.z.repeat_interleave(rows, 0), at, self.unit_std)


class LatentNetwork(Observer):
    """A network whose layers carry latents, and the likelihood that reads its output.

    Attributes:
        unit_std: τ of each layer, (layers,), a buffer: standard deviation of the factors of single units.
    """

    unit_std: Tensor

    def __init__(self, net: nn.Module, likelihood: Likelihood) -> None:
        super().__init__()
        self.net, self.likelihood = net, likelihood
        self.logits: Pick | None = None
        self._lock = threading.RLock()  # latents hold the z of one forward pass at a time
        self._watched: set[tuple[bool, bool]] = set()  # (mode, a z each row) in which the layers' calls were checked
        self._searches = 0  # for the batch in layers' inputs
        self._in_rows: dict[Any, int] = {}  # by shapes of inputs: entries of a draw as rows, 0 if it may not be run so
        self._links: list[tuple[dict[str, Any], str, nn.Module]] = []  # modules on the way to the latents
        self._latents: dict[str, Latent] = {}
        self._carriers: list[tuple[nn.Module, Latent]] = []  # layers and their latents
        layers, device = len(self.latents), next(net.parameters()).device
        self.register_buffer("unit_std", torch.zeros(layers, device=device))

    @property
    def latents(self) -> dict[str, Latent]:
        """Latents by the name of their layer, in the order of the nodes."""
        if torch.compiler.is_compiling():  # what is kept would be guarded, and change
            return _found_latents(self.net)
        if not self._latents or not all(owner.get(name) is child for owner, name, child in self._links):
            found = _found_latents(self.net)
            self._links, self._latents = _links(self._modules, found), found
            self._carriers = [(self.net.get_submodule(name), latent) for name, latent in found.items()]
        return self._latents

    @property
    def nodes(self) -> int:
        """Number of latent variables of one draw, over all layers."""
        return sum(latent.nodes for latent in self.latents.values())

    def by_layer(self, values: Tensor) -> list[tuple[str, Latent, Tensor]]:
        """Returns every layer's name, its latent, and its part of values (…, nodes)."""
        latents = self.latents
        parts = values.split([latent.nodes for latent in latents.values()], dim=-1)
        return list(zip(latents, latents.values(), parts, strict=True))

    def outputs(self, x: Inputs, z: Tensor | Draws, batch_size: int | None = None) -> Tensor:
        """Returns the outputs of the network in its present mode for given latents, (J, B, …).

        Args:
            x: What one call of the network takes, of B rows.
            z: J draws of the latents, (J, nodes); or (J, B, nodes), a draw for each row.
            batch_size: Lets several draws for a few inputs pass as one batch of at most this many rows.
        """
        return self._all_outputs(call_arguments(x), z, batch_size)

    def _all_outputs(self, call: Call, z: Tensor | Draws, batch_size: int | None = None) -> Tensor:
        with nullcontext() if torch.compiler.is_compiling() else self._lock:  # layers fold weights for several passes
            return torch.cat(list(self._each_output(call, z, batch_size)))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Holds the model in eval mode, and locked for other threads, within a block."""
        with self._lock, evaluating(self):
            yield

    def _each_output(self, call: Call, z: Tensor | Draws, batch_size: int | None = None) -> Iterator[Tensor]:
        """Yields what `outputs` returns; several draws for few inputs run as rows of batches of that size."""
        z = z if isinstance(z, Draws) else Draws(z)
        rows = batch_length(call)
        most = (batch_size or 0) // rows if z.z.dim() == 2 else 1  # draws at once
        if rows > FEW or min(most, len(z)) < 2 or not (entries := self._entries_as_rows(call, z[0])):
            yield self._read(self._run(call, z[0]))[None]
            z, little = z[1:], rows > FEW and min(most, len(z) - 1) > 1 and self._entries() <= LITTLE
            entries = self._entries_as_rows(call, z[0]) if little else 0
            entries = entries if entries <= LITTLE else 0  # of recurrent layers more than before
        at_once = min(most, CACHED // entries) if entries else 1
        if at_once > 1 and (first := self._first_rows_of_draws(call, z.split(at_once)[0])) is not None:
            yield first
            yield from (self._rows_of_draws(call, part) for part in z.split(at_once)[1:])
            return
        one_for_all = z.z.dim() == 2  # a z for each row cannot be in weights
        with self._folding_where_cheaper(units=z.at is not None) if one_for_all else nullcontext():
            yield from (self._read(self._run(call, z[number]))[None] for number in range(len(z)))

    def _rows_of_draws(self, call: Call, z: Draws) -> Tensor:
        """Returns the outputs of J draws from one forward pass on J copies of the batch."""
        rows = batch_length(call)
        copies = tree_map(lambda t: _copies(t, rows, len(z)), call)
        output = self._read(self._run(copies, z.each_row(rows)))
        return output.reshape(len(z), rows, *output.shape[1:])

    def _first_rows_of_draws(self, call: Call, z: Draws) -> Tensor | None:
        """Returns the outputs of the first draws from one pass, None if these inputs do not go as rows of draws."""
        try:
            return self._rows_of_draws(call, z)
        except ValueError:  # a layer does not see the batch: masks of the same shape may be others
            self._in_rows[self._shapes(call)] = 0
            return None

    @staticmethod
    def _shapes(call: Call) -> tuple[torch.Size, ...]:
        return tuple(tensor.shape for tensor in tensors(call))

    def _entries(self) -> int:
        """Returns how many entries were multiplied by z in the last pass."""
        return sum(latent.entries for latent in self.latents.values())

    def _entries_as_rows(self, call: Call, z: Draws) -> int:
        """Returns how many entries a draw has as rows of a batch, 0 if rows affect each other; runs two both ways."""
        key = self._shapes(call)
        if key not in self._in_rows:
            at = None if z.at is None else torch.stack([z.at, z.at + 1])
            pair = Draws(torch.stack([z.z, 1.5 * z.z]), at, z.unit_std)
            expected = torch.cat(list(self._each_output(call, pair)))
            try:
                found = self._rows_of_draws(call, pair)
                gap = (found - expected).abs().max()
                close = bool(gap <= torch.finfo(gap.dtype).eps ** 0.5 * expected.abs().max())
                entries = max(found.numel(), self._entries()) // 2
                self._in_rows[key] = entries if close else 0
            except Exception:  # a layer that does not see the batch first, a network of one batch length …
                self._in_rows[key] = 0
        return self._in_rows[key]

    @contextmanager
    def _folding_where_cheaper(self, *, units: bool) -> Iterator[None]:
        """Within a block, without gradients, layers with fewer weights than input entries multiply weights by z.

        Not those whose inputs are multiplied anyway, by factors of their units.
        """
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            yield
            return
        folding = []
        for name, latent in self.latents.items():
            layer = self.net.get_submodule(name)
            if units and latent.placed:
                continue
            if latent.entries > sum(p.numel() for p in layer.parameters(recurse=False)) and foldable(layer):
                folding.append(latent)
        try:
            for latent in folding:
                latent.folding = True
            yield
        finally:
            for latent in folding:
                latent.folding = False

    def _read(self, output: Any) -> Tensor:
        """Returns the tensor in the network's output that the likelihood is about."""
        return self.likelihood.read(pick(output, self.logits))

    def _run(self, call: Call, z: Tensor | Draws) -> Any:
        """Runs the network once with z (nodes,) for all rows, or (R, nodes), a row each."""
        args, kwargs = call
        draw = z if isinstance(z, Draws) else Draws(z)
        if torch.compiler.is_compiling():
            with self._multiplied_by(draw):
                return self.net(*args, **kwargs)
        kind = (self.training, draw.z.dim() == 2)
        first = kind not in self._watched
        self._multiply_last()
        settle = functools.partial(self._settle, call) if draw.z.dim() == 2 else None
        watch = bypassed(self.net, self.latents) if first else nullcontext(set[str]())
        with self._lock, no_fast_path():
            if settle and not self._searches:
                self._search(call)
            with self._multiplied_by(draw, settle), watch as names:
                output = self.net(*args, **kwargs)
        if names:
            got = f"one that reads the weight of {sorted(names)} directly, past their latents"
            remedy = f"Leave them out: convert(..., exclude={sorted(names)})."
            raise RuntimeError(complaint("net", "a network that calls the layers it converts", got, remedy))
        self._watched.add(kind)
        return self._remembered(output, draw)

    def _multiply_last(self) -> None:
        """Lets layers multiply what all other hooks have made of their input, also hooks that came later."""
        _ = self.latents
        for layer, latent in self._carriers:
            hooks = layer._forward_pre_hooks
            if len(hooks) > 1 and getattr(next(reversed(hooks.values())), "__self__", None) is not latent:
                for number in [n for n, hook in hooks.items() if getattr(hook, "__self__", None) is latent]:
                    hooks[number] = hooks.pop(number)  # the last

    def _search(self, call: Call) -> None:
        """Finds out where layers see the batch."""
        if torch._C._functorch.peek_interpreter_stack() is None:  # where shapes are those of single rows
            find_batch(self.net, self.latents, call)
            self._searches += 1

    def _settle(self, call: Call, latent: Latent, fold: int) -> None:
        """Lets a layer see so many entries for each row; searches for the batch again the first few times."""
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())  # others would wait
        if alone and self._searches < _SEARCHES:
            self._search(call)
        latent.folds |= {fold}

    def _units(self, draw: Draws) -> list[Units | None]:
        """Returns the unit factors of every layer in a draw."""
        at = draw.at
        if at is None:
            return [None] * len(self.latents)
        stds = (self.unit_std.clone() if draw.unit_std is None else draw.unit_std).unbind()
        if len(stds) != len(self.latents):
            got = f"{len(stds)} of {len(self.latents)}: layers were replaced since"
            remedy = "Convert the changed network anew: ibnn.convert(ibnn.revert(model))."
            raise ValueError(complaint("net", "a network with as many layers with latents as converted", got, remedy))
        latents = enumerate(self.latents.values())
        return [Units(stds[n], at[..., n]) if latent.placed else None for n, latent in latents]

    @contextmanager
    def _multiplied_by(self, draw: Draws, settle: Callable[[Latent, int], None] | None = None) -> Iterator[None]:
        """Gives every latent its part of a draw within a block."""
        parts = self.by_layer(draw.z)
        try:
            for (_, latent, part), units in zip(parts, self._units(draw), strict=True):
                latent.take(part, units, settle)
            yield
        finally:
            for _, latent, _ in parts:
                latent.take(None, None)
                while latent.after:  # only after an interrupt
                    latent.after.pop()()

    def _remembered(self, output: Any, draw: Draws) -> Any:
        """Lets layers that the backward pass runs again (gradient checkpointing) find this draw; returns the output."""
        if torch.is_grad_enabled():
            for tensor in tensors(output):
                if tensor.requires_grad:  # its gradient comes first, before any layer is run again
                    tensor.register_hook(functools.partial(self._recall, draw))
        return output

    def _recall(self, draw: Draws, gradient: Tensor) -> None:
        for (_, latent, part), units in zip(self.by_layer(draw.z), self._units(draw), strict=True):
            latent.recall = (backward_pass(), part, units)

    @contextmanager
    def _unchanged_on_error(self) -> Iterator[None]:
        """Restores the network's small buffers (running statistics) if the block fails."""
        if torch.compiler.is_compiling():
            yield
            return
        named = [(m, name, b) for m in self.net.modules() for name, b in m._buffers.items() if b is not None]
        buffers = [(*entry, entry[2].clone()) for entry in named if entry[2].numel() <= _SMALL]
        try:
            yield
        except BaseException:
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer.copy_(value)
            raise

    def _with_loss(self, call: Call, z: Tensor | Draws, draws: Tensor) -> Any:
        """Returns the network's own output, with its loss, for the combined logits of all draws."""
        # One more pass finds the module that returns the logits; in a last pass it returns the combined ones instead.
        # If no module returns them as they are and there is one label per row, the loss is the likelihood's.
        combined = self.likelihood.combine(draws)
        with returned(self.net) as made:
            output = self._run(call, z)
        if isinstance(output, Tensor) or not isinstance(combined, Tensor):  # labels are an input like others
            return combined
        logits = self._read(output)
        maker = next((module for module, tensor in reversed(made) if tensor is logits), None)
        if maker is not None and combined.shape == logits.shape:
            with maker.register_forward_hook(lambda *_: combined.to(logits.dtype)):
                return self._run(call, z)
        plain = isinstance(output, MutableMapping) and "logits" in output and self.logits is None
        if not plain or not isinstance(self.likelihood, Categorical) or combined.dim() != 2:
            remedy = "Call it without labels, and compute the loss of what it returns."
            got = f"one whose logits {tuple(logits.shape)} come from no module as they are"
            raise TypeError(complaint("labels", "given to a network whose loss can be computed", got, remedy))
        output["logits"] = combined
        output["loss"] = F.nll_loss(combined, call[1]["labels"], ignore_index=self.likelihood.ignore_index)
        return output

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles get a lock of their own, and find their latents anew."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_lock"}
        return kept | {"_links": [], "_latents": {}, "_carriers": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()


def _copies(tensor: Tensor, rows: int, copies: int) -> Tensor:
    """Returns copies of an input; those of one image are in the same memory, so that convolutions know them as such."""
    one_image = rows == 1 and tensor.dim() > 3 and len(tensor) == 1
    return tensor.expand(copies, *tensor.shape[1:]) if one_image else repeat_rows(tensor, rows, copies)


def _found_latents(net: nn.Module) -> dict[str, Latent]:
    return {name.rpartition(".")[0]: m for name, m in net.named_modules() if isinstance(m, Latent)}


def _links(root: dict[str, Any], latents: dict[str, Latent]) -> list[tuple[dict[str, Any], str, nn.Module]]:
    """Returns every module on the way from a root to latents, with the dict that holds it and its name there."""
    links: dict[tuple[int, str], tuple[dict[str, Any], str, nn.Module]] = {}
    for path in latents:
        owner = root
        for name in filter(None, ("net", *path.split("."), "latent")):
            links[id(owner), name] = owner, name, owner[name]
            owner = owner[name]._modules
    return list(links.values())
