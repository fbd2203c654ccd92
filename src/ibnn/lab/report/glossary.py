"""GLOSSARY: the words of a report for readers who do not know them."""

from ibnn.lab.report.markup import section, text

_WORDS = {
    "Confidence": "The probability that the prediction gives to the class it predicts.",
    "Error": "Share of test rows whose most probable class is not the true one.",
    "NLL": "Negative log-likelihood: the mean of −log p(true class), in nats. It punishes confident mistakes; lower is "
    "better, 0 is perfect, and log C is what guessing among C classes gets.",
    "ECE": "Expected calibration error: how far confidence and accuracy are apart, averaged over 15 bins of "
    "confidence. 0 means that of all answers given with 80 % confidence, 80 % are right. A useless model can have a "
    "low one: read it with the NLL.",
    "Brier": "Squared distance of the probabilities to the true class, summed over classes: 0 is perfect, 2 the worst.",
    "Total uncertainty": "The entropy of the answer in nats: 0 when one class has all the probability. It is the sum "
    "of the aleatoric and the epistemic part.",
    "Aleatoric": "The part of the doubt that every draw of the network has: the input itself is ambiguous, and more "
    "training data would not help.",
    "Epistemic": "The part on which draws of the network disagree: the model does not know. It splits into between "
    "(the components of the posterior disagree) and within (draws of one component do).",
    "Draw": "One network drawn from the posterior. The answer is the mean of all draws' probabilities.",
    "Temperature": "A number that the network's scores are divided by, chosen on held-out labels: above 1 it makes "
    "the answers less confident.",
    "Out of distribution": "Inputs of a kind that was not in the training data. A good model doubts them.",
    "AUROC": "Probability that a row out of distribution is doubted more than a test row: 1 is perfect, 0.5 chance.",
    "FPR95": "Share of test rows that are flagged, too, when the threshold flags 95 % of the rows out of distribution.",
    "Risk and coverage": "If only the most certain rows are answered (coverage), how many of these answers are wrong "
    "(risk). AURC is the mean of the risk over all coverages; lower is better.",
    "95 % interval": "The range of the middle 95 % of the values that one gets by drawing the test rows again and "
    "again, with replacement (bootstrap). It says nothing of other seeds or other data.",
}


def glossary() -> str:
    """The section."""
    items = "".join(f"<dt>{text(word)}</dt><dd>{text(meaning)}</dd>\n" for word, meaning in _WORDS.items())
    return section("glossary", "Glossary", "", [f"<dl>\n{items}</dl>\n"])
