"""A Hugging Face model in `ibnn.transformers.Trainer`: a small ViT on the digits, its loss the ELBO."""

import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

import ibnn
from ibnn.transformers import Trainer


def main(epochs: int = 20) -> dict[str, float]:
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(digits.target)
    rows = [{"pixel_values": image, "labels": label} for image, label in zip(x, y, strict=True)]
    train, test = rows[:1200], rows[1200:]

    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=10,
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    )  # fmt: skip
    model = ibnn.convert(ViTForImageClassification(config), components=4, seed=0)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=32, per_device_eval_batch_size=256,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, logging_strategy="no",
            learning_rate=5e-3,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=test, latent_lr=1e-2)
        trainer.train()
        result = trainer.evaluate()

    prediction = model.predict({"pixel_values": x[1200:]})
    return {
        "eval_loss": result["eval_loss"],
        "error": ibnn.metrics.error(prediction.probs, y[1200:]),
        "nll": ibnn.metrics.nll(prediction.log_probs, y[1200:]),
        "epistemic": prediction.epistemic.mean().item(),
    }


if __name__ == "__main__":
    print(main())
