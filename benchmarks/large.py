"""What a Llama of 7 billion weights would take: planned by `ibnn.cost`, with seconds scaled from a small one.

    python benchmarks/large.py [--json FILE]

The small one (8 layers, width 512) is trained here for a few steps: all weights, latents alone, LoRA with latents, and
latents on a base of 8-bit weights. Its CPU seconds per product, times the products of the large one, are no measurement
of the large one: they say what this machine would need.
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from report import parser, saved_bytes, tell
from torch import Tensor, nn

import ibnn

TURNS, TOKENS, COMPONENTS, VOCABULARY = 7, 128, 4, 1000
LARGE = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
SMALL = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}


class Int8(nn.Module):
    """A linear layer with weights of 8 bits, as a stand-in for those of quantisation packages."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes with the weights as floats."""
        assert isinstance(self.scale, Tensor)
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


class Quantised(nn.Module):
    """A quantised layer with a factor for each input, into which z can be folded."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.base = layer.in_features, Int8(layer)
        self.gain = nn.Parameter(torch.ones(layer.in_features), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies, then calls the layer."""
        output: Tensor = self.base(x * self.gain)
        return output


def quantise(net: nn.Module) -> nn.Module:
    """Replaces every linear layer but the last, in place."""
    for name, module in list(net.named_modules()):
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            parent, _, key = name.rpartition(".")
            setattr(net.get_submodule(parent), key, Quantised(module))
    return net


def llama(sizes: dict[str, int], vocabulary: int, device: str) -> nn.Module:
    """A language model with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes))


def frozen(net: nn.Module) -> nn.Module:
    return net.requires_grad_(False)


def adapted(net: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(net, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))  # type: ignore[arg-type]


def measure() -> dict[str, Any]:
    """Seconds, kept bytes and trained parameters of each way to train the small one."""
    ibnn.register_layer(Quantised, nodes="in_features", fold=lambda layer, z: layer.gain * z, weight="gain")  # type: ignore[operator]
    torch.manual_seed(0)
    net = llama(SMALL, VOCABULARY, "cpu")
    words = torch.randint(VOCABULARY, (4, TOKENS))
    batch = {"input_ids": words}
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "all weights": lambda net: net,
        "latents only": frozen,
        "LoRA and latents": adapted,
        "latents on 8 bits": lambda net: frozen(quantise(net)),
    }
    models = {
        name: ibnn.convert(way(copy.deepcopy(net)), components=COMPONENTS, seed=0, likelihood=ibnn.Categorical(axis=-1))
        for name, way in ways.items()
    }

    def plain() -> Tensor:
        logits: Tensor = net(**batch).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())

    calls: dict[str, Callable[[], Tensor]] = {"plain": plain}
    for name, model in models.items():
        calls[name] = lambda model=model: model.train().elbo(batch, words, n_data=10**6).loss  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS + 1):
        for name, call in calls.items():
            began = time.process_time()
            call().backward()
            if turn:
                seconds[name].append(time.process_time() - began)
    found: dict[str, Any] = {}
    for name, call in calls.items():
        module = models.get(name, net)
        with saved_bytes([*module.parameters(), *module.buffers()]) as saved:
            call()
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["plain"], strict=True))
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        times = {"step_seconds": round(statistics.median(seconds[name]), 4), "over_plain": round(ratio, 3)}
        found[name] = times | {"kept_megabytes": round(saved.bytes / 1e6, 1), "trained_parameters": trained}
    planned = ibnn.cost(net, batch, components=COMPONENTS)
    return {"ways": found, "cost": planned._asdict()}


def gigabytes(cost: dict[str, int], lora: int) -> dict[str, dict[str, float]]:
    """What a step holds, by arithmetic: weights of 16 or 4 bits, gradients and Adam's moments of 32 bits, activations.

    Activations are `step_bytes` of `ibnn.cost`, which are of 32 bits; half of that in bfloat16.
    """
    ways = {
        "all weights": (2, cost["weights"] + cost["latents"]),
        "latents only": (2, cost["latents"]),
        "LoRA and latents": (2, cost["latents"] + lora),
        "latents on 4 bits": (0.5, cost["latents"]),
    }
    found = {}
    for name, (bytes_each, trained) in ways.items():
        master = 4 if name == "all weights" else 0  # copies of 32 bits that the optimiser steps on
        parts = {
            "weights": cost["weights"] * bytes_each,
            "trained": trained * (12 + master),  # a gradient, and two moments of Adam
            "activations": cost["step_bytes"] / 2,
        }
        found[name] = {key: round(value / 1e9, 2) for key, value in (parts | {"total": sum(parts.values())}).items()}
    return found


def main() -> None:
    """Measures, plans and scales."""
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    small = measure()
    net = llama(LARGE, 32000, "meta")
    words = torch.zeros(1, 512, dtype=torch.long, device="meta")
    large = ibnn.cost(net, {"input_ids": words}, components=COMPONENTS)._asdict()
    rate = small["ways"]["all weights"]["step_seconds"] / small["cost"]["step_products"]
    share = {name: way["step_seconds"] for name, way in small["ways"].items()}
    scaled = {name: round(large["step_products"] * rate * t / share["all weights"], 1) for name, t in share.items()}
    lora = 2 * 32 * 8 * 2 * 4096  # two adapted projections a layer, of rank 8, two matrices each
    result = {
        "what": "A Llama of 8 layers measured, one of 7 billion weights planned, its seconds scaled by products",
        "small": {**SMALL, "rows": 4, "tokens": TOKENS, "components": COMPONENTS, **small},
        "large": {**LARGE, "rows": 1, "tokens": 512, "components": COMPONENTS, "cost": large},
        "large_gigabytes_by_arithmetic": gigabytes(large, lora),
        "scaled_step_seconds_of_one_thread_here": scaled,
    }
    tell(result, options.json, "accelerate", "transformers", "peft")


if __name__ == "__main__":
    main()
