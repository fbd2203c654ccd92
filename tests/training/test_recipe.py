from pathlib import Path

import pytest

from ibnn import Recipe, Schedule


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"learning_rate": 0.1}, r"`learning_rate` to be a key of the recipe, but got 0.1. Did you mean 'lr'\?"),
        ({"batch": 8}, r"Did you mean 'batch_size'\?"),
        ({"num_epochs": 8}, r"Did you mean 'epochs'\?"),
        ({"max_iter": 8}, r"Did you mean 'steps'\?"),
        ({"wd": 0.1}, r"Did you mean 'weight_decay'\?"),
        ({"weightdecay": 0.1}, r"Did you mean 'weight_decay'\?"),
        ({"early_stopping": 3}, r"Did you mean 'patience'\?"),
        ({"patients": 3}, r"Did you mean 'patience'\?"),
        ({"optimizer": "adam"}, r"Did you mean 'optimiser'\?"),
        ({"latent_optimizer": "adam"}, r"Did you mean 'latent_optimiser'\?"),
        ({"Learning-Rate": 1.0}, r"Did you mean 'lr'\?"),
        ({"random_state": 1}, r"Did you mean 'seed'\?"),
        ({"epoch": 3}, r"`epoch` .*Did you mean 'epochs'\?"),
        ({"schedule": {"knd": "linear"}}, r"`schedule.knd` .*Did you mean 'kind'\?"),
        ({"lr": "fast"}, r"`lr` to be a valid number, but got 'fast' \(str\)"),
        ({"lr": -1.0}, r"`lr` to be greater than 0, but got -1.0"),
        ({"epochs": 1.5}, r"`epochs` to be a valid integer"),
        ({"optimiser": "lion"}, r"`optimiser` to be 'adam', 'sgd' or"),
        ({"epochs": 3, "steps": 4}, "Give epochs or steps, not both"),
        ({"ema": 0.9, "swa": 0.5}, "Give one of ema, swa and patience"),
        ({"ema": 0.9, "patience": 3}, "Give one of ema, swa and patience"),
        ({"lr": float("nan")}, "`lr`"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Recipe(**fields)


@pytest.mark.parametrize(
    ("field", "others"),
    [
        ("accumulate", "gradient_accumulation gradient_accumulation_steps accumulate_grad_batches"),
        ("batch_size", "batch bs minibatch minibatch_size train_batch_size"),
        ("beta", "kl_weight kl_beta"),
        ("beta_warmup", "kl_warmup kl_annealing"),
        ("checkpoint_every", "checkpoint_interval save_steps"),
        ("clip", "grad_clip gradient_clip gradient_clip_val max_grad_norm max_norm"),
        ("ema", "ema_decay"),
        ("epochs", "num_epochs n_epochs max_epochs num_train_epochs"),
        ("eval_samples", "n_eval_samples validation_samples"),
        ("evaluate_every", "eval_every validate_every check_val_every_n_epoch"),
        ("freeze_batchnorm", "freeze_bn"),
        ("latent_lr", "latent_learning_rate"),
        ("latent_optimiser", "latent_optimizer"),
        ("lr", "learning_rate rate"),
        ("optimiser", "optimizer"),
        ("patience", "early_stopping early_stop early_stopping_patience"),
        ("precision", "mixed_precision amp"),
        ("samples", "num_samples n_samples mc_samples"),
        ("schedule", "scheduler lr_schedule lr_scheduler"),
        ("seed", "random_state random_seed rng_seed"),
        ("steps", "num_steps n_steps max_steps iterations max_iter"),
        ("trackers", "logger loggers report_to log_with"),
        ("weight_decay", "wd decay"),
        ("workers", "num_workers n_workers dataloader_num_workers"),
    ],
)
def test_what_others_call_a_field_leads_to_it(field: str, others: str) -> None:
    for other in others.split():
        with pytest.raises(ValueError, match=f"Did you mean '{field}'"):
            Recipe(**{other: 1})


def test_recipe_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Recipe().lr = 1.0  # type: ignore[misc]


def test_toml_round_trip(tmp_path: Path) -> None:
    recipe = Recipe(
        steps=7, lr=3e-4, trackers=("tensorboard",), schedule=Schedule(kind="cosine", start=0.1), kl="pairwise"
    )
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.to_toml())
    assert Recipe.from_toml(path) == recipe


def test_but_changes_and_validates() -> None:
    recipe = Recipe(epochs=3, lr=0.1)
    assert recipe.but(steps=5) == Recipe(steps=5, lr=0.1)
    with pytest.raises(ValueError, match="`lr`"):
        recipe.but(lr=0.0)


def test_schedules_against_the_paper_s() -> None:
    linear = Schedule(kind="linear")
    # 300 epochs: constant to 150, then linear to 1 % at 270, then constant
    for epoch, factor in ((0, 1.0), (149, 1.0), (210, 0.505), (270, 0.01), (299, 0.01)):
        assert linear.factor(epoch / 300) == pytest.approx(factor)
    cosine = Schedule(kind="cosine", start=0.0, end=1.0, final=0.0)
    assert [cosine.factor(t) for t in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.5, 0.0])
    assert Schedule(warmup=0.1).factor(0.05) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="must come before"):
        Schedule(kind="linear", start=0.9, end=0.5)


def test_beta_warms_up_over_two_thirds() -> None:
    recipe = Recipe(beta=1.0)
    assert [recipe.beta_at(epoch / 300) for epoch in (0, 100, 200, 299)] == pytest.approx([0, 0.5, 1, 1])
    assert Recipe(beta=3.0, beta_warmup=0.0).beta_at(0.0) == 3.0


@pytest.mark.parametrize(
    ("name", "lr", "latent_lr", "decay"),
    [
        ("paper-vgg16-cifar10", 0.05, 1.2, 5e-4),
        ("paper-vgg16-cifar100", 0.05, 1.6, 3e-4),
        ("paper-wrn28x10-cifar10", 0.1, 2.4, 5e-4),
        ("paper-wrn28x10-cifar100", 0.1, 4.8, 5e-4),
    ],
)
def test_paper_s_recipes(name: str, lr: float, latent_lr: float, decay: float) -> None:
    recipe = Recipe.named(name)
    assert (recipe.lr, recipe.latent_lr, recipe.weight_decay) == (lr, latent_lr, decay)
    assert (recipe.epochs, recipe.batch_size, recipe.samples, recipe.undo_k) == (300, 128, 2, False)
    assert recipe.schedule.factor(210 / 300) == pytest.approx(0.505)
    assert recipe.latent_schedule.factor(0.99) == 1.0


def test_paper_s_imagenet_recipe() -> None:
    recipe = Recipe.named("paper-resnet50-imagenet")
    rates = [recipe.latent_lr * recipe.latent_schedule.factor(epoch / 15) for epoch in (0, 5, 7, 9, 14)]
    assert rates == pytest.approx([0.2, 0.2, 0.125, 0.05, 0.05])


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'paper-vgg16-cifar10'"):
        Recipe.named("vgg16-cifar10")
