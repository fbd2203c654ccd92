"""PASSES: runs a network whose layers carry latents with given z: one for all rows, one each, or many in turn."""

import functools
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.inputs import Pick, batch_length, pick, repeat_rows, tensors, tree_map
from ibnn.latent import Latent, backward_pass
from ibnn.layers.attention import no_fast_path
from ibnn.layers.folding import foldable
from ibnn.layers.observe import batch_axes, bypassed, returned, returning
from ibnn.likelihood import Categorical, Likelihood

FEW = 16  # rows of a batch that is worth repeating for several draws at once
CACHED = 2**24  # entries of the rows of one pass that caches hold; more of them would go through memory
_SMALL = 2**16  # entries of a buffer that is worth a copy at every step


class LatentNetwork(nn.Module):
    """A network whose layers carry latents, and the likelihood that reads its output."""

    def __init__(self, net: nn.Module, likelihood: Likelihood, logits: Pick | None = None) -> None:
        super().__init__()
        self.net, self.likelihood, self.logits = net, likelihood, logits
        self._lock = threading.RLock()  # latents hold the z of one forward pass at a time
        self._watched: set[tuple[bool, bool]] = set()  # (mode, a z each row) in which the layers' calls were checked
        self._in_rows: dict[int, int] = {}  # by batch length: entries of a draw as rows, 0 if it may not be run so

    @property
    def latents(self) -> dict[str, Latent]:
        """Latents by the name of their layer, in the order of the nodes."""
        return {name.rpartition(".")[0]: m for name, m in self.net.named_modules() if isinstance(m, Latent)}

    @property
    def nodes(self) -> int:
        """Number of latent variables of one draw, over all layers."""
        return sum(latent.nodes for latent in self.latents.values())

    def _outputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor, batch_size: int | None = None
    ) -> Tensor:
        """Returns the network's output tensor for each draw of z (J, nodes): (J, B, …).

        With `batch_size`, draws for few inputs run as rows of batches of at most that size: weights are read once.
        """
        return torch.cat(list(self._each_output(args, kwargs, z, batch_size)))

    def _each_output(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor, batch_size: int | None = None
    ) -> Iterator[Tensor]:
        """Yields what `_outputs` returns, a few draws at a time, (j, B, …)."""
        rows = batch_length((args, kwargs))
        at_once = (batch_size or 0) // rows
        if rows <= FEW and min(at_once, len(z)) > 1 and (entries := self._entries_as_rows(args, kwargs, z[0])):
            at_once = min(at_once, max(1, CACHED // entries))
        else:
            at_once = 1
        if at_once > 1:
            yield from (self._rows_of_draws(args, kwargs, part) for part in z.split(at_once))
            return
        yield self._read(self._run(args, kwargs, z[0]))[None]
        with self._folding_where_cheaper():
            yield from (self._read(self._run(args, kwargs, draw))[None] for draw in z[1:])

    def _rows_of_draws(self, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> Tensor:
        """Returns what `_outputs` does, from one forward pass on J copies of the batch."""
        rows = batch_length((args, kwargs))
        args, kwargs = tree_map(lambda t: repeat_rows(t, rows, len(z)), (args, kwargs))
        output = self._read(self._run(args, kwargs, z.repeat_interleave(rows, 0)))
        return output.reshape(len(z), rows, *output.shape[1:])

    def _entries_as_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> int:
        """Returns how many input or output entries a draw has as rows of a batch; 0 if rows affect each other.

        For each new batch length, two draws are run both ways.
        """
        rows = batch_length((args, kwargs))
        if rows not in self._in_rows:
            pair = torch.stack([z, 1.5 * z])
            expected = self._outputs(args, kwargs, pair)
            try:
                found = self._rows_of_draws(args, kwargs, pair)
                gap = (found - expected).abs().max()
                close = bool(gap <= torch.finfo(gap.dtype).eps ** 0.5 * expected.abs().max())
                entries = max(found.numel(), sum(latent.entries for latent in self.latents.values())) // 2
                self._in_rows[rows] = entries if close else 0
            except Exception:  # a layer that does not see the batch first, a network of one batch length …
                self._in_rows[rows] = 0
        return self._in_rows[rows]

    @contextmanager
    def _folding_where_cheaper(self) -> Iterator[None]:
        """Within a block, without gradients, layers with fewer weights than input entries multiply weights by z."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            yield
            return
        folding = []
        for name, latent in self.latents.items():
            layer = self.net.get_submodule(name)
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

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> Any:
        """Runs the network once with z (nodes,) for all rows, or (R, nodes), a row each."""
        if torch.compiler.is_compiling():
            with self._multiplied_by(z):
                return self.net(*args, **kwargs)
        kind = (self.training, z.dim() == 2)
        if kind in self._watched:
            with self._lock, self._multiplied_by(z), no_fast_path():
                return self._remembered(self.net(*args, **kwargs), z)
        rows = batch_axes(self.net, self.latents, args, kwargs) if z.dim() == 2 else nullcontext()
        watch = bypassed(self.net, self._layers())
        with self._lock, self._multiplied_by(z), no_fast_path(), rows, watch as names:
            output = self.net(*args, **kwargs)
        if names:
            got = f"one that reads the weight of {sorted(names)} directly, past their latents"
            remedy = f"Leave them out: convert(..., exclude={sorted(names)})."
            raise RuntimeError(complaint("net", "a network that calls the layers it converts", got, remedy))
        self._watched.add(kind)
        return self._remembered(output, z)

    def _layers(self) -> dict[str, nn.Module]:
        """Returns the layers that carry latents, by name."""
        return {name: self.net.get_submodule(name) for name in self.latents}

    @contextmanager
    def _multiplied_by(self, z: Tensor) -> Iterator[None]:
        """Gives every latent its part of z within a block."""
        latents = list(self.latents.values())
        parts = z.split([latent.nodes for latent in latents], dim=-1)
        try:
            for latent, part in zip(latents, parts, strict=True):
                latent.z, latent.entries = part, 0
            yield
        finally:
            for latent in latents:
                latent.z = None
                while latent.after:  # only after an interrupt
                    latent.after.pop()()

    def _remembered(self, output: Any, z: Tensor) -> Any:
        """Lets layers that the backward pass runs again (gradient checkpointing) find this z; returns the output."""
        if torch.is_grad_enabled():
            for tensor in tensors(output):
                if tensor.requires_grad:  # its gradient comes first, before any layer is run again
                    tensor.register_hook(functools.partial(self._recall, z))
        return output

    def _recall(self, z: Tensor, gradient: Tensor) -> None:
        latents = list(self.latents.values())
        for latent, part in zip(latents, z.split([latent.nodes for latent in latents], dim=-1), strict=True):
            latent.recall = (backward_pass(), part)

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

    def _with_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor, draws: Tensor) -> Any:
        """Returns the network's own output, with its loss, for the combined logits of all draws.

        One more pass finds the module that returns the logits; in a last pass it returns the combined ones instead.
        If no module returns them as they are and there is one label per row, the loss is the likelihood's.
        """
        combined = self.likelihood.combine(draws)
        with returned(self.net) as made:
            output = self._run(args, kwargs, z)
        if isinstance(output, Tensor) or not isinstance(combined, Tensor):  # labels are an input like others
            return combined
        logits = self._read(output)
        maker = next((module for module, tensor in reversed(made) if tensor is logits), None)
        if maker is not None and combined.shape == logits.shape:
            with returning(maker, combined.to(logits.dtype)):
                return self._run(args, kwargs, z)
        plain = isinstance(output, MutableMapping) and "logits" in output and self.logits is None
        if not plain or not isinstance(self.likelihood, Categorical) or combined.dim() != 2:
            remedy = "Call it without labels, and compute the loss of what it returns."
            got = f"one whose logits {tuple(logits.shape)} come from no module as they are"
            raise TypeError(complaint("labels", "given to a network whose loss can be computed", got, remedy))
        output["logits"] = combined
        output["loss"] = F.nll_loss(combined, kwargs["labels"], ignore_index=self.likelihood.ignore_index)
        return output

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles get a lock of their own."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()
