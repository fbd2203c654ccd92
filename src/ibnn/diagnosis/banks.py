"""BANKS: checks of a sampled posterior; and which checks of mixtures say nothing about one."""

from collections.abc import Callable

from ibnn.diagnosis import checks
from ibnn.diagnosis.checks import Case, Finding
from ibnn.sampling.chains import MOST, disagreement, effective_size
from ibnn.sampling.settings import FEWEST

_WORTH = 50  # effective samples: an average over them is within 14 % of a standard deviation

# Chains are to agree, and their moments were never trained.
_OF_MIXTURES = {checks.nothing_learnt, checks.duplicates, checks.collapsed, checks.never_moved}


def _disagreeing(case: Case) -> Finding | None:
    bank = case.model.bank
    if bank is None or bank.shape[1] < FEWEST:
        return None
    found = disagreement(bank.cpu())
    return None if found is None else Finding("warning", None, *found)


def _few(case: Case) -> Finding | None:
    bank = case.model.bank
    if bank is None or bank.shape[1] < FEWEST:
        return None
    worth = effective_size(bank.cpu()).quantile(MOST).item()
    count = bank.shape[0] * bank.shape[1]
    what = f"The {count:,} samples are worth {worth:.0f} independent ones, at the worst {MOST:.0%} of the nodes."
    remedy = "Sample with a larger thin, or more samples; predictions need fewer than estimates of single latents."
    return Finding("warning", None, what, remedy) if worth < _WORTH else None


def checks_of(case: Case) -> list[Callable[[Case], Finding | None]]:
    """Returns the checks that fit a model's posterior."""
    if case.model.bank is None:
        return list(checks.CHECKS)
    return [*(check for check in checks.CHECKS if check not in _OF_MIXTURES), _disagreeing, _few]
