import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import ibnn
from ibnn import mixture
from ibnn.diagnosis import Finding, diagnose

Optimisers = Optimizer | Sequence[Optimizer] | None


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def make_model(components: int = 4, **options: Any) -> ibnn.IBNN:
    return ibnn.convert(make_net(), components=components, seed=0, **({"kl": "mean"} | options))


def train(model: ibnn.IBNN, optimiser: Optimizer, steps: int = 6) -> None:
    model.train()
    x = torch.randn(steps, 32, 6)
    for batch in x:
        y = batch[:, :3].argmax(1)
        optimiser.zero_grad()
        model.elbo(batch, y, n_data=192).loss.backward()
        optimiser.step()


def trained(**options: Any) -> tuple[ibnn.IBNN, Optimizer]:
    """A model fresh from a training as it should be, in eval mode."""
    model = make_model(**options)
    optimiser = Adam(model.parameter_groups(lr=0.01))
    train(model, optimiser)
    ibnn.fit_novelty(model, torch.randn(400, 6))
    return model.eval(), optimiser


def only(model: ibnn.IBNN, optimiser: Optimisers = None) -> Finding:
    """The one finding there is."""
    (finding,) = diagnose(model, optimiser=optimiser).findings
    return finding


# ---------------------------------------------------------------------------------------------- one case per finding


def non_finite(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    model.latents["3"].rho.data[1, 2] = torch.nan
    return optimiser


def non_finite_statistics(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    model.net[1].running_var[0] = torch.inf  # type: ignore[index]
    return optimiser


def nothing_learnt(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    model.kl_kind = "components"
    model.set_posterior(mean=1.02, std=0.3)  # 0.02² / (2 · 0.3²) = 0.0022 nats a node
    return optimiser


def nothing_learnt_by_the_surrogate(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    model.set_posterior(mean=1.04, std=0.6)  # √K s; 0.04² / (2 · 0.6²) = 0.0022 again
    return optimiser


def duplicates(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    for latent in model.latents.values():
        latent.mean.data[2], latent.rho.data[2] = latent.mean.data[0].clone(), latent.rho.data[0].clone()
    return optimiser


def collapsed(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    step = torch.tensor([-1.0, 1.0, -1.0, 1.0])[:, None]  # variance 1 between components
    noise = torch.tensor([0.01, 0.05, 0.2, 0.8])[:, None]  # the second moment is 0.171: not the same Gaussians
    model.set_posterior(mean=1 + 0.02 * step, std=noise)  # 0.0004 / 0.1711 = 0.23 %
    return optimiser


def apart(model: ibnn.IBNN, std: float | torch.Tensor) -> None:
    model.set_posterior(mean=1 + 2 * torch.arange(4.0)[:, None], std=std)


def wide(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    model.kl_kind = "components"
    apart(model, torch.cat([torch.full((6,), 1.0), torch.full((8,), 1.2)]))
    return optimiser


def wide_for_the_surrogate(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    apart(model, 2.1)  # σ/s = 7, above 3 √K
    return optimiser


def dead(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    model.latents["0"].set(std=torch.tensor(0.0024))
    return optimiser


def no_gradient(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    model.latents["0"].mean.grad = None
    return optimiser


def zero_gradient(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    model.latents["0"].rho.grad = torch.zeros_like(model.latents["0"].rho)
    return None


def weight_decay(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    return AdamW(model.parameters(), weight_decay=0.02)


def forgotten(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    rest = [p for name, p in model.named_parameters() if name != "net.3.latent.rho"]
    return SGD(rest, lr=0.1)


def twice(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    return [optimiser, Adam(model.latents["0"].parameters())]


def unscaled(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    model.gradient_scale = 1.0
    return SGD(model.parameters(), lr=0.1)


def batchnorm_training(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    model.net[1].train()  # type: ignore[index]
    return optimiser


def dropout(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    model.net[2] = nn.Sequential(nn.ReLU(), nn.Dropout(0.25), nn.Dropout2d(0.4))  # type: ignore[operator]
    return optimiser


def second_softmax(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    model.net = nn.Sequential(*model.net, nn.Softmax(1))  # type: ignore[misc]
    return optimiser


def no_reference(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    model.reference = None
    return None


def few_held_out(model: ibnn.IBNN, optimiser: Optimizer) -> Optimisers:
    ibnn.fit_novelty(model, torch.randn(100, 6), torch.randn(98, 6))
    return optimiser


Provocation = Callable[[ibnn.IBNN, Optimizer], Optimisers]
CASES: list[tuple[Provocation, str, str | None, list[str]]] = [
    (non_finite, "problem", "3", ["NaN", "'3'", "checkpoint"]),
    (non_finite_statistics, "problem", "1", ["infinite", "'1'", "clip"]),
    (nothing_learnt, "note", None, ["0.0022 nats a node", "Lower beta"]),
    (nothing_learnt_by_the_surrogate, "warning", None, ["0.0022 nats a node", "one component"]),
    (duplicates, "warning", None, ["4 components count as 2.8: some repeat", "gamma"]),
    (collapsed, "warning", None, ["4 components have collapsed: 0.23%", "gamma"]),
    (wide, "warning", "3", ["4.0 times", "'3', '0'", "Raise beta"]),
    (wide_for_the_surrogate, "warning", "0", ["7.0 times", "Raise beta"]),
    (dead, "warning", "0", ["0.0080 of the prior's", "overconfident", "Raise beta"]),
    (no_gradient, "warning", "0", ["gradient", "'0'", "elbo"]),
    (zero_gradient, "warning", "0", ["gradient", "'0'"]),
    (weight_decay, "warning", "0", ["Weight decay", "0.69", "parameter_groups"]),
    (forgotten, "problem", "3", ["does not have", "'3'", "parameter_groups"]),
    (twice, "problem", "0", ["More than one", "one group"]),
    (unscaled, "note", "0", ["1/4", "by K"]),
    (batchnorm_training, "problem", "1", ["train mode", "'1'", "model.eval()"]),
    (dropout, "note", "2.2", ["up to 0.4", "'2.2'", "p = 0"]),
    (second_softmax, "warning", None, ["ends in a softmax", "no probability can be near 1", "logits"]),
    (no_reference, "note", None, ["cannot tell novel inputs", "ibnn.fit_novelty(model, train, valid)"]),
    (few_held_out, "note", None, ["below 0.0101", "Hold out 99 or more", "p.novel(0.0101)"]),
]


def test_nothing_is_found_on_a_model_fresh_from_training() -> None:
    for kind in ("mean", "components", "pairwise", "montecarlo"):
        model, optimiser = trained(kl=kind)
        for mode in (True, False):
            for known in (None, optimiser, [optimiser]):
                report = diagnose(model.train(mode), optimiser=known)
                assert report.findings == (), report
                assert report.healthy
                assert str(report).endswith("\nNothing to worry about.")


@pytest.mark.parametrize(("provoke", "severity", "layer", "words"), CASES, ids=[case[0].__name__ for case in CASES])
def test_each_finding_is_provoked_alone(
    provoke: Provocation, severity: str, layer: str | None, words: list[str]
) -> None:
    model, optimiser = trained()
    report = diagnose(model, optimiser=provoke(model, optimiser))
    (finding,) = report.findings
    assert (finding.severity, finding.layer) == (severity, layer), finding
    assert report.healthy == (severity == "note")
    for word in words:
        assert word in str(finding)
    assert str(report).endswith(str(finding))


def test_a_model_in_training_needs_no_reference_yet() -> None:
    model, optimiser = trained()
    model.reference = None
    assert diagnose(model, optimiser=optimiser).findings == diagnose(model.train()).findings == ()
    ibnn.fit_novelty(model, torch.randn(100, 6), torch.randn(100, 6))
    assert diagnose(model.eval()).findings == ()


# --------------------------------------------------------------------------------------------------- what inputs show

INPUTS = torch.randn(100, 6, generator=torch.Generator().manual_seed(3))


def test_the_epistemic_share_is_that_of_predict_and_nothing_changes() -> None:
    model, optimiser = trained()
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = diagnose(model, optimiser=optimiser, inputs=INPUTS)
    prediction: Any = model.predict(INPUTS, samples=2)
    share = (prediction.epistemic.mean() / prediction.total.mean()).item()
    assert report.epistemic_share == pytest.approx(share, rel=1e-4)
    assert f"distinct components 4.0, epistemic share {share:.1%}\n" in str(report)
    assert diagnose(model).epistemic_share is None
    assert diagnose(model, inputs=INPUTS.numpy()) == diagnose(model, inputs=(INPUTS,))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize(("noise", "found"), [(0.01, True), (0.6, False)])
def test_draws_that_hardly_disagree_are_found(noise: float, found: bool) -> None:
    model, optimiser = trained()
    mean = 1 + noise * torch.randn(4, 14, generator=torch.Generator().manual_seed(0))
    model.set_posterior(mean=mean, std=noise)
    model.prior_std = noise  # or the noise itself would be what is found
    report = diagnose(model, optimiser=optimiser, inputs=INPUTS)
    assert report.epistemic_share is not None
    assert (report.epistemic_share < 0.015) == found
    assert report.healthy != found
    words = f"warning: {report.epistemic_share:.1%} of the uncertainty is epistemic: the draws hardly disagree"
    assert (words in str(report)) == found
    assert str(report).endswith("Nothing to worry about.") != found
    if found:
        (finding,) = report.findings
        assert "Go by the total." in finding.remedy
        model.examples.zero_()  # of a calibrated network little noise may be what held-out labels asked for
        assert "note: " + words.removeprefix("warning: ") in str(diagnose(model, inputs=INPUTS))


class Ending(nn.Module):
    """Ends in a function, not in a module."""

    def __init__(self, end: Callable[[torch.Tensor], torch.Tensor], outputs: int = 3) -> None:
        super().__init__()
        self.head, self.end = nn.Linear(6, outputs), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.head(x))


def _softmax_findings(net: nn.Module, likelihood: str = "categorical") -> list[str]:
    model = ibnn.convert(net, components=2, seed=0, likelihood=likelihood)
    findings = diagnose(model, inputs=INPUTS).findings
    return [f"{f.severity}: {f.what}" for f in findings if "ends in" in f.what]


def test_a_network_that_ends_in_a_softmax_of_its_own_is_found() -> None:
    torch.manual_seed(0)
    limit = math.e / (math.e + 2)
    adds = "warning: The network ends in a {}, and the likelihood adds its own: "
    words = adds.format("softmax") + "no probability can be near 1."
    for net in (Ending(lambda x: x.softmax(1)), nn.Sequential(nn.Linear(6, 3), nn.Sequential(nn.Softmax(1)))):
        assert _softmax_findings(net) == [words]
        model = ibnn.convert(net, components=2, seed=0)
        prediction: Any = model.predict(100 * INPUTS)
        assert prediction.probs.max().item() == pytest.approx(limit, abs=1e-3)
    assert not _softmax_findings(Ending(lambda x: x.log_softmax(1)))  # harmless
    sigmoid = nn.Sequential(nn.Linear(6, 3), nn.Sigmoid())
    assert _softmax_findings(sigmoid, "bernoulli") == [adds.format("sigmoid") + "no probability can be near 1."]
    assert _softmax_findings(sigmoid)
    assert not _softmax_findings(sigmoid, "gaussian")
    assert not _softmax_findings(Ending(lambda x: x.softmax(1)), "gaussian")
    assert not _softmax_findings(Ending(lambda x: x))
    assert not _softmax_findings(Ending(lambda x: x.abs()))
    assert not _softmax_findings(nn.Sequential(nn.Linear(6, 4), nn.Softmax(1), nn.Linear(4, 3)))


def test_weights_that_are_not_finite_are_a_finding_with_inputs_too() -> None:
    model, optimiser = trained()
    non_finite(model, optimiser)
    report = diagnose(model, inputs=INPUTS)
    assert report.epistemic_share is None
    assert report.findings[0].severity == "problem"


# ---------------------------------------------------------------------------------------------- the numbers of a layer


def kl_normal(m: float, v: float, s: float) -> float:
    """By quadrature of log q − log p."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(8)
    z = m + math.sqrt(v) * nodes
    logs = stats.norm.logpdf(z, m, math.sqrt(v)) - stats.norm.logpdf(z, 1, s)
    return float(weights @ logs / weights.sum())


@pytest.mark.parametrize("kind", ["mean", "components", "pairwise", "montecarlo"])
def test_layers_are_what_they_say(kind: str) -> None:
    model = make_model(components=3, kl=kind, prior_std=0.4)
    report = diagnose(model)
    assert [(row.name, row.nodes) for row in report.layers] == [("0", 6), ("3", 8)]
    kls = []
    for row in report.layers:
        latent = model.latents[row.name]
        mean = latent.mean.detach().double().numpy()
        std = np.log1p(np.exp(latent.rho.detach().double().numpy()))
        if kind == "mean":
            kl = sum(kl_normal(m, v, 0.4) for m, v in zip(mean.mean(0), (std**2).sum(0) / 9, strict=True))
        else:
            kl = sum(kl_normal(m, v, 0.4) for m, v in zip(mean.ravel(), std.ravel() ** 2, strict=True)) / 3
        kls.append(kl)
        assert row.kl == pytest.approx(kl, rel=1e-5)
        assert row.std == pytest.approx(std.mean(), rel=1e-6)
        assert row.std_ratio == pytest.approx(std.mean() / 0.4, rel=1e-6)
        assert row.spread == pytest.approx(np.sqrt((mean.std(0) ** 2).mean()), rel=1e-6)
        assert row.shift == pytest.approx(np.abs(mean - 1).mean(), rel=1e-6)
    assert [row.kl_share for row in report.layers] == pytest.approx(np.array(kls) / sum(kls), rel=1e-5)
    assert sum(row.kl_share for row in report.layers) == pytest.approx(1)


@pytest.mark.parametrize("kind", ["mean", "components"])
def test_layers_add_up_to_the_models_own_kl(kind: str) -> None:
    model, _ = trained(kl=kind)
    assert sum(row.kl for row in diagnose(model).layers) == pytest.approx(model.kl().item(), rel=1e-5)


def test_effective_components_are_the_gap_between_the_two_bounds() -> None:
    model = make_model(components=5, init_std=0.02)
    q = model.posterior()
    gap = mixture.kl_components(q, 1.0) - mixture.kl_pairwise(q, 1.0)
    assert 1.5 < gap.exp() < 4.9  # neither all equal nor all apart
    assert diagnose(model).effective_components == pytest.approx(gap.exp().item(), rel=1e-4)


@pytest.mark.parametrize(("copies", "distinct"), [([0, 0, 0, 0], 1), ([0, 0, 2, 2], 2), ([0, 1, 2, 3], 4)])
def test_effective_components_count_distinct_ones(copies: list[int], distinct: int) -> None:
    model = make_model()
    q = model.posterior()
    model.set_posterior(mean=q.mean[copies] * 10, std=q.std[copies])
    assert diagnose(model).effective_components == pytest.approx(distinct, rel=1e-6)


def test_overlap_of_two_components_is_the_bhattacharyya_coefficient() -> None:
    model = ibnn.convert(nn.Linear(1, 1), components=2)
    model.set_posterior(mean=torch.tensor([[0.8], [1.3]]), std=torch.tensor([[0.2], [0.5]]))
    p, q = stats.norm(0.8, 0.2), stats.norm(1.3, 0.5)
    overlap = integrate.quad(lambda z: math.sqrt(p.pdf(z) * q.pdf(z)), -5, 7, points=[0.8, 1.3])[0]
    assert diagnose(model).effective_components == pytest.approx(2 / (1 + overlap), rel=1e-6)


# ------------------------------------------------------------------------------------------------- edges of the checks


def test_a_fresh_model_is_only_told_to_train() -> None:
    for options in ({}, {"init_std": 0.75}, {"components": 1}, {"components": 1, "init_std": 0.0}):
        finding = only(make_model(**options))
        assert finding == Finding("note", None, "The latents are where convert put them.", "Train the model.")
    assert only(make_model().double()).remedy == "Train the model."
    assert only(make_model().half()).remedy == "Train the model."
    assert only(make_model().bfloat16()).remedy == "Train the model."


def test_noise_set_by_hand_may_be_meant_so() -> None:
    model = make_model().eval()
    model.set_posterior(mean=1.0, std=0.1)  # no training at all: the same noise everywhere
    assert only(model).severity == "note"
    assert "count as 1.0" in only(model).what
    model.set_posterior(std=0.3)
    assert only(model).severity == "note"
    assert "is the prior" in only(model).what


def test_noise_switched_off_has_shares_and_is_not_called_infinite() -> None:
    model = make_model().eval()
    model.set_posterior(std=0.0)
    report = diagnose(model)
    assert [row.std for row in report.layers] == [0, 0]
    assert sum(row.kl_share for row in report.layers) == pytest.approx(1)
    assert "0.0000 of the prior's" in only(model).what
    assert report.effective_components == pytest.approx(4)


def test_a_posterior_on_the_prior_has_no_shares() -> None:
    model = make_model(components=1)
    model.set_posterior(mean=1.0)
    for latent in model.latents.values():
        latent.rho.data.zero_()
    model.prior_std = model.latents["0"].std.double()[0, 0].item()
    assert [row.kl_share for row in diagnose(model).layers] == [0, 0]


def test_gradients_of_zero_everywhere_are_no_evidence() -> None:
    model, optimiser = trained()
    optimiser.zero_grad(set_to_none=False)
    model.latents["0"].mean.grad = None
    assert diagnose(model).findings == ()


def test_an_optimiser_inside_a_wrapper_is_seen() -> None:
    class Wrapper(Optimizer):  # what accelerate does
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

    model = make_model()
    model.examples.fill_(1)
    model.set_posterior(std=0.06, mean=model.posterior().mean * 1.1)
    assert "1/4" in only(model, Wrapper(SGD(model.parameters(), lr=0.1))).what
    model.components = 1  # nothing to undo
    assert not any("SGD" in f.what for f in diagnose(model, optimiser=SGD(model.parameters(), lr=0.1)).findings)


def test_findings_come_the_worst_first_and_name_no_more_than_three_layers() -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(5)])
    model = ibnn.convert(net, seed=0)
    model.net[0].append(nn.Dropout(0.5))
    model.set_posterior(std=1e-4)
    model.eval().net.train()
    report = diagnose(model)
    assert [finding.severity for finding in report.findings] == ["problem", "warning", "note"]
    assert report.findings[0].layer == "0.1"
    assert "'0.1', '1.1', '2.1' and 2 more" in report.findings[0].what
    assert not report.healthy


def test_nan_everywhere_is_one_problem() -> None:
    model, optimiser = trained()
    model.set_posterior(mean=torch.nan, std=0.1)
    finding = only(model, optimiser)
    assert (finding.severity, finding.layer) == ("problem", "0")
    assert "nan" in str(diagnose(model))


# --------------------------------------------------------------------------------------------- reading and being read


def test_diagnosing_changes_nothing() -> None:
    model, optimiser = trained()
    model.net[1].train()  # type: ignore[index]
    del optimiser.state[model.latents["0"].mean]
    state = copy.deepcopy(model.state_dict())
    grads = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    memory, known = copy.deepcopy(optimiser.state_dict()), len(optimiser.state)
    generator = torch.get_rng_state()
    first = diagnose(model, optimiser=optimiser)
    assert diagnose(model, optimiser=optimiser) == first
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    for p, (grad, value) in zip(model.parameters(), grads, strict=True):
        assert p.grad is grad
        assert value is None or torch.equal(p.grad, value)  # type: ignore[arg-type]
    assert len(optimiser.state) == known
    assert str(optimiser.state_dict()) == str(memory)
    assert model.gradient_scale == 4
    assert all(latent.current_pass.z is None for latent in model.latents.values())


def test_the_table() -> None:
    model = ibnn.convert(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), components=2, prior_std=0.5, kl="components")
    model.set_posterior(mean=torch.tensor([[1.0, 1.0, 1.5, 1.5], [1.0, 1.0, 0.5, 0.5]]), std=0.5)
    assert str(diagnose(model)).splitlines()[:4] == [
        "layer    nodes  KL share  mean σ  σ/prior  spread of μ  mean |μ−1|",
        "0            2      0.0%   0.500     1.00        0.000       0.000",
        "1            2    100.0%   0.500     1.00        0.500       0.500",
        "KL 1.0 nats ('components'), distinct components 1.5",
    ]


def test_the_table_says_when_the_kl_does_not_split() -> None:
    for kind in ("pairwise", "montecarlo"):
        report = diagnose(make_model(kl=kind))
        assert report.kl_kind == kind
        assert "nats ('components')" in str(report)


def test_a_net_that_is_one_layer_and_results_that_stay() -> None:
    report = diagnose(ibnn.convert(nn.Linear(3, 2), components=1))
    assert str(report).splitlines()[1].startswith("(net)        3    100.0%")
    with pytest.raises(FrozenInstanceError):
        report.findings = ()  # type: ignore[misc]


def test_it_says_what_it_takes() -> None:
    with pytest.raises(TypeError, match="Expected `model` to be an IBNN made by convert, but got Linear"):
        diagnose(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Expected `optimiser` to be torch optimisers, but got Parameter"):
        diagnose(make_model(), optimiser=list(nn.Linear(1, 1).parameters()))  # type: ignore[arg-type]
    model = make_model()
    ibnn.revert(model)
    with pytest.raises(RuntimeError, match="Convert it again"):
        diagnose(model)


def test_components_that_their_kl_takes_to_the_prior_are_no_warning() -> None:
    """The default KL does so by design: nothing to warn about after every run."""
    for kl, severity in (("components", "note"), ("mean", "warning")):
        model = make_model(kl=kl)
        model.set_posterior(mean=1.0, std=0.1)  # all alike, away from the prior
        model.examples.fill_(100)
        found = [f.severity for f in diagnose(model).findings if "some repeat others" in f.what]
        assert found == [severity]


def banked(bank: torch.Tensor) -> str:
    model = make_model(2).eval()
    model.examples.fill_(100)
    model.set_bank(1 + 0.3 * bank)
    return str(diagnose(model))


def test_chains_that_agree_are_no_finding_however_alike() -> None:
    text = banked(torch.randn(2, 300, 14))
    assert "chains" not in text
    assert "worth" not in text
    assert "repeat others" not in text
    assert "collapsed" not in text


def test_chains_that_disagree_or_stand_still_are_warned_of() -> None:
    apart = banked(torch.randn(2, 300, 14) + torch.tensor([0.0, 3.0])[:, None, None])
    assert "warning: The chains disagree: 100% of the nodes" in apart
    slow = torch.randn(2, 10, 14).repeat_interleave(30, 1) + 0.01 * torch.randn(2, 300, 14)
    assert "The 600 samples are worth" in banked(slow)
