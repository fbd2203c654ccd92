"""DISPLAY: the words and colours that tables, pages and figures share. Imports nothing."""

SCORES = {
    "error": "error %",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "aurc": "AURC",
    "rmse": "RMSE",
    "coverage": "in 90 % interval",
}
UNCERTAINTIES = {"max_prob": "largest probability", "total": "total entropy", "epistemic": "epistemic part"}
COSTS = {
    "train_seconds": "seconds of training",
    "rows": "rows trained on",
    "steering_rows": "held-out forward passes for steering",
    "parameters": "parameters",
    "latents": "of them latents",
    "stored": "numbers stored",
    "forwards": "forward passes per prediction",
}

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: safe for the colour-blind
OTHER = "#BBBBBB"  # whatever has no colour of its own
