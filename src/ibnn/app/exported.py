"""Reads an exported ONNX file back, and returns its answers as predictions."""

import json
import os
from typing import Any

import torch
from torch import Tensor

from ibnn.errors import complaint
from ibnn.files.export import FACTS, onnx_session, run_onnx
from ibnn.files.sealed import extra
from ibnn.inputs import Inputs
from ibnn.likelihood import LIKELIHOODS, Likelihood
from ibnn.prediction import BernoulliPrediction, CategoricalPrediction, GaussianPrediction, JointPrediction, Prediction


class ExportedFile:
    """An ONNX file that `ibnn.export` wrote: it answers, and says what the predictor needs to know."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the file; raises ValueError if it is no file of `ibnn.export`."""
        extra("onnxruntime")
        try:
            self.session = onnx_session(os.fspath(path))
            self.facts: dict[str, Any] = json.loads(self.session.get_modelmeta().custom_metadata_map[FACTS])
        except Exception as error:  # whatever onnxruntime finds wrong with it
            got = f"{path} ({type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else '–'})"
            raise ValueError(complaint("MODEL", "an .onnx file that ibnn.export wrote", got, "Export it.")) from error
        inputs, novelty = self.session.get_inputs(), self.facts.get("p_value") or {}
        self.shapes = {each.name: list(each.shape[1:]) for each in inputs}  # axes of any length are names
        self.whole = "int" in inputs[0].type  # takes integers
        self.components: int = self.facts["components"]
        self.ranked: int | None = novelty.get("held_out")  # held-out inputs that p-values are ranks among
        self.fallback: float | None = novelty.get("fallback")  # p-value below which answers are mixed with base rates
        name = self.facts["likelihood"].removeprefix("OnePass")
        self.likelihood: Likelihood | None = next((c() for c in LIKELIHOODS.values() if c.__name__ == name), None)

    def predict(self, x: Inputs) -> Prediction:
        """Returns the answers for a batch. Intervals of a regression are those of one Gaussian."""
        return self._prediction(run_onnx(self.session, x))

    def _prediction(self, found: dict[str, Tensor]) -> Prediction:
        novelty: dict[str, Any] = {"p_value": found.pop("p_value", None), "ranked": self.ranked or 0}
        if "aleatoric" not in found:  # several heads: "age.mean" and so on
            heads: dict[str, dict[str, Tensor]] = {}
            for name, value in found.items():
                head, _, output = name.rpartition(".")
                heads.setdefault(head, {})[output] = value
            return JointPrediction({head: self._prediction(values) for head, values in heads.items()}, **novelty)
        aleatoric, epistemic = found["aleatoric"], found["epistemic"].clamp_min(0)
        none, unknown = torch.zeros_like(epistemic), torch.full_like(epistemic, torch.nan)
        if "mean" in found:
            mean, std = found["mean"], found["std"]
            return GaussianPrediction(mean, aleatoric, epistemic, none, unknown, mean[None], std[None], **novelty)
        probs = found["probabilities"]
        parts = (probs, probs.log(), aleatoric, epistemic, none, torch.full_like(probs, torch.nan))
        if probs.shape == aleatoric.shape:
            return BernoulliPrediction(*parts, torch.log1p(-probs), **novelty)
        return CategoricalPrediction(*parts, **novelty, axis=1 if probs.shape[2:] == aleatoric.shape[1:] else -1)
