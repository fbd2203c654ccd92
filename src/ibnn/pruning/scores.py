"""NODE SCORES: how much the loss needs each node, by its gradient with respect to z.

Cutting a node sets its z to 0. Near an optimum the loss then grows by ½ z² E[(∂L/∂z)²], with E over rows and draws
(Fisher's matrix in place of the second derivative). But many nodes go at once, and each matters more once others are
gone: E is also over random parts of the network. With z a row each, every row has a part of its own, and one backward
pass gives ∂L/∂z of all of them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ibnn.inputs import Inputs, call_arguments
from ibnn.network import IBNN
from ibnn.passes import Draws


def row_gradients(model: IBNN, x: Inputs, z: Tensor | Draws, of: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the gradient of a function of the network's output with respect to z of each row, (B, nodes).

    Args:
        model: In the mode in which it is to run; rows must not affect each other.
        x: What one call of the network takes, of B rows.
        z: Latents of each row, (B, nodes).
        of: Takes the outputs (B, …), returns a sum over rows; or several of them, (C,), for a result (C, B, nodes):
            `lambda output: output.sum(0)` gives the Jacobians of all rows, from C backward passes.

    >>> import ibnn
    >>> net = torch.nn.Linear(2, 1, bias=False)
    >>> _ = net.weight.data.fill_(3.0)
    >>> row_gradients(ibnn.convert(net), torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.ones(2, 2), torch.sum)
    tensor([[ 3.,  6.],
            [ 0., 12.]])
    """
    draw = z if isinstance(z, Draws) else Draws(z)
    leaf = draw.z.detach().clone().requires_grad_()
    with torch.enable_grad():
        found = of(model._read(model._run(call_arguments(x), Draws(leaf, draw.at, draw.unit_std))))
        each = [torch.autograd.grad(sum_, leaf, retain_graph=True)[0] for sum_ in found.reshape(-1)]
    return torch.stack(each).reshape(*found.shape, *leaf.shape)


def sensitivities(
    model: IBNN, x: Inputs, y: Tensor, z: Tensor | Draws, groups: Tensor, mask: Tensor, part: Tensor
) -> Tensor:
    """Returns (∂L/∂m)² / 2 of every row and channel, (B, channels): m multiplies z of all nodes of a channel.

    Args:
        model: The converted network.
        x: A batch of inputs.
        y: Its targets.
        z: Latents of each row, (B, nodes).
        groups: The channel of every node, (nodes,), numbered from 0; −1 for none.
        mask: m of each row, (B, channels).
        part: By what the gradient of each node is multiplied, (nodes,): the part that others do not make up for.
    """
    likelihood, draw = model.likelihood, z if isinstance(z, Draws) else Draws(z)
    whole, channels = draw.z.detach(), int(groups.max()) + 1
    at = torch.where(groups < 0, channels, groups).to(whole.device)

    def loss(output: Tensor) -> Tensor:
        likelihood.check(output, y)
        terms = likelihood.terms(output, y)
        return terms.loss * terms.weight.to(output)

    factors = torch.cat([mask.to(whole), whole.new_ones(len(whole), 1)], 1)
    draw = Draws(whole * factors[:, at], draw.at, draw.unit_std)
    each = whole * row_gradients(model, x, draw, loss) * part.to(whole)
    return each.new_zeros(len(each), channels + 1).index_add_(1, at, each)[:, :channels].square() / 2
