"""Your own training loop, in plain PyTorch: convert, add the KL to your loss, predict with uncertainty."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import ibnn


def main(epochs: int = 30) -> dict[str, float]:
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    x_train, y_train, x_test, y_test = x[:1200], y[:1200], x[1200:], y[1200:]

    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = ibnn.convert(net, components=8)
    optimiser = torch.optim.Adam(model.parameter_groups(lr=3e-3, latent_lr=1e-2))

    for _ in range(epochs):
        model.train()
        for rows in torch.randperm(len(x_train)).split(64):
            loss = F.cross_entropy(model(x_train[rows]), y_train[rows]) + model.kl() / len(x_train)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    prediction = model.predict(x_test)
    return {
        "error": ibnn.metrics.error(prediction.probs, y_test),
        "nll": ibnn.metrics.nll(prediction.log_probs, y_test),
        "epistemic": prediction.epistemic.mean().item(),
    }


if __name__ == "__main__":
    print(main())
