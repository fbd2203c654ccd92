"""A converted network in a LightningModule: the ELBO is the training step, parameter_groups the optimiser."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ibnn


class LitIBNN(lightning.LightningModule):
    def __init__(self, net: nn.Module, n_data: int) -> None:
        super().__init__()
        self.model, self.n_data = ibnn.convert(net, components=8), n_data

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        terms = self.model.elbo(x, y, n_data=self.n_data)
        self.log_dict({"nll": terms.nll, "kl": terms.kl})
        return terms.loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("valid_nll", nn.functional.nll_loss(self.model(x), y))  # eval mode: log probabilities

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameter_groups(lr=3e-3, latent_lr=1e-2))


def main(epochs: int = 10) -> dict[str, float]:
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, valid = TensorDataset(x[:1200], y[:1200]), TensorDataset(x[1200:], y[1200:])
    module = LitIBNN(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), n_data=len(train))
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=10,
    )
    trainer.fit(module, DataLoader(train, batch_size=64, shuffle=True), DataLoader(valid, batch_size=256))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    print(main())
