"""Hugging Face models as they are, tiny and at random: what holds for any network holds for each of them."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import check_split, entropy_split
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ibnn
from ibnn.inputs import batch_length, logits_of
from ibnn.latent import Latent

hf = pytest.importorskip("transformers")

B, C = 3, 4
Batch = dict[str, Tensor]

pytestmark = pytest.mark.usefixtures("no_accelerate_state")


def _words(length: int = 6) -> Batch:
    mask = torch.arange(length).expand(B, length) < torch.tensor([[length], [length - 2], [length - 1]])
    ids = torch.randint(5, 30, (B, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids * mask + 2 * ~mask, "attention_mask": mask.long()}


def _pixels(size: int = 16) -> Batch:
    return {"pixel_values": torch.randn(B, 3, size, size, generator=torch.Generator().manual_seed(0))}


TEXT = {"vocab_size": 30, "num_labels": C, "pad_token_id": 2}
WIDE = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
LLAMA = WIDE | TEXT | {"num_key_value_heads": 1, "max_position_embeddings": 16, "use_cache": False}
IMAGE = WIDE | {"image_size": 16, "patch_size": 8, "num_labels": C}
SOUND = {"feat_extract_norm": "layer", "conv_dim": (6, 6), "conv_stride": (4, 2), "conv_kernel": (5, 3)}

MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[], Batch]]] = {
    "BERT": ("BertForSequenceClassification", "BertConfig", WIDE | TEXT, _words),
    "DistilBERT": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        TEXT | {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12},
        _words,
    ),
    "RoBERTa": ("RobertaForSequenceClassification", "RobertaConfig", WIDE | TEXT, _words),
    "DeBERTa-v2": ("DebertaV2ForSequenceClassification", "DebertaV2Config", WIDE | TEXT, _words),
    "GPT-2": (
        "GPT2ForSequenceClassification",
        "GPT2Config",
        TEXT | {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 1},
        _words,
    ),
    "Llama": ("LlamaForSequenceClassification", "LlamaConfig", LLAMA, _words),
    "Qwen2": ("Qwen2ForSequenceClassification", "Qwen2Config", LLAMA, _words),
    "T5": (
        "T5ForSequenceClassification",
        "T5Config",
        TEXT | {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "eos_token_id": 1}
        | {"decoder_start_token_id": 0},
        lambda: (words := _words()) | {"input_ids": torch.cat([words["input_ids"][:, 1:], torch.ones(B, 1).long()], 1)},
    ),
    "ViT": ("ViTForImageClassification", "ViTConfig", IMAGE, _pixels),
    "Swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "window_size": 2}
        | {"num_labels": C},
        _pixels,
    ),
    "ConvNeXt": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": (8, 12), "depths": (1, 1), "num_stages": 2, "num_labels": C},
        _pixels,
    ),
    "ResNet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": (8, 16), "depths": (1, 1), "num_labels": C},
        _pixels,
    ),
    "Wav2Vec2": (
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        WIDE | SOUND | {"num_labels": C, "num_feat_extract_layers": 2, "classifier_proj_size": 6}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0},
        lambda: {"input_values": torch.randn(B, 90, generator=torch.Generator().manual_seed(0))},
    ),
    "Whisper": (
        "WhisperForAudioClassification",
        "WhisperConfig",
        {"d_model": 8, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 12, "num_labels": C}
        | {"num_mel_bins": 4, "max_source_positions": 10, "classifier_proj_size": 6},
        lambda: {"input_features": torch.randn(B, 4, 20, generator=torch.Generator().manual_seed(0))},
    ),
}  # fmt: skip


@cache
def _made(name: str) -> tuple[nn.Module, Batch]:
    model, config, options, inputs = MODELS[name]
    dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "resid_pdrop")
    dropouts += ("embd_pdrop", "attn_pdrop", "dropout_rate", "drop_path_rate", "hidden_dropout", "activation_dropout")
    dropouts += ("seq_classif_dropout", "layerdrop", "encoder_layerdrop", "feat_proj_dropout", "final_dropout")
    dropouts += ("classifier_dropout",)
    config = getattr(hf, config)(**options)
    for dropout in dropouts:
        if getattr(config, dropout, None):
            setattr(config, dropout, 0.0)
    torch.manual_seed(0)
    net = getattr(hf, model)(config).eval()
    for parameter in net.parameters():  # their own start is so small that nothing matters
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5 / parameter[0].numel() ** 0.5)
    return net, inputs()


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Batch]:
    net, inputs = _made(request.param)
    return copy.deepcopy(net), inputs


def converted(net: nn.Module, **options: Any) -> ibnn.IBNN:
    return ibnn.convert(net, **{"components": 2, "init_std": 0.3, "seed": 0, **options})


def test_z_of_one_is_the_model_and_keys_are_kept(case: Any) -> None:
    net, inputs = case
    model = converted(net, init_std=0.0)
    kept = [name for name in model.net.state_dict() if ".latent." not in name]
    assert kept == list(net.state_dict())
    linear = [n for n, m in net.named_modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]
    assert set(linear) <= set(model.latents)
    model.set_posterior(std=0.0)
    with torch.no_grad():
        expected = net(**inputs).logits
        assert expected.shape == (B, C)
        assert torch.equal(model.draw_logits(inputs, samples=1)[0], expected)
        model.train()
        for module in model.net.modules():  # BatchNorm goes by the batch in train mode
            module.training = module.training and not isinstance(module, nn.BatchNorm2d)
        assert torch.allclose(logits_of(model(**inputs)), expected, atol=1e-5)


def test_every_latent_and_weight_gets_a_gradient(case: Any) -> None:
    net, inputs = case
    model = converted(net).train()
    model.elbo(inputs, torch.arange(B) % C, n_data=9, beta=0.0).loss.backward()
    for name, latent in model.latents.items():
        assert latent.mean.grad is not None, name
        assert latent.mean.grad.ne(0).any(), name
        assert latent.rho.grad.ne(0).any(), name


def test_rows_are_computed_with_their_own_z(case: Any) -> None:
    """Draws as rows of one batch are the plain networks of these draws, which the library does not run."""
    net, inputs = case
    model, seen = converted(net), []
    note = lambda _, args, kwargs: seen.append(batch_length(kwargs))  # noqa: E731
    with torch.no_grad():
        model.draw_logits(inputs, samples=2, batch_size=99)
        with model.net.register_forward_pre_hook(note, with_kwargs=True):
            rows = model.draw_logits(inputs, samples=2, batch_size=99)
        assert sum(seen) == B * len(rows)
        assert len(seen) < len(rows)  # draws did pass as rows
        assert torch.allclose(model.draw_logits(inputs, samples=2), rows, atol=2e-5)
        for j, row in enumerate(rows):
            drawn = model.draw(component=j // 2, index=j % 2)
            assert type(drawn) is type(net)
            assert not any(isinstance(module, Latent) for module in drawn.modules())
            assert torch.allclose(drawn(**inputs).logits, row, atol=2e-5)
        assert (rows[0] - rows[1]).abs().max() > 1e-3


def test_prediction_and_files(case: Any, tmp_path: Path) -> None:
    net, inputs = case
    model = converted(net)
    answers = model.predict(inputs, samples=2)
    assert answers.probs.shape == (B, C)
    check_split(answers, entropy_split(model.draw_logits(inputs, samples=2).unflatten(0, (-1, 2))))
    pieces = model.predict(inputs, samples=2, batch_size=1)
    assert torch.allclose(pieces.probs, answers.probs, atol=1e-5)
    rows = [{name: x[i] for name, x in inputs.items()} | {"labels": torch.tensor(0)} for i in range(B)]
    loader = DataLoader(rows, batch_size=2)
    assert torch.allclose(model.predict(loader, samples=2).probs, answers.probs, atol=1e-5)
    for latents_only in (False, True):
        model.save_pretrained(tmp_path / str(latents_only), latents_only=latents_only)
        again = ibnn.load(tmp_path / str(latents_only), net)
        assert torch.equal(again.predict(inputs, samples=2).probs, answers.probs)
    assert ibnn.revert(model).state_dict().keys() == net.state_dict().keys()


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama", "T5", "ViT", "Whisper"])
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    net, inputs = _made(name)
    gradients = []
    for checkpointed in (False, True):
        model = converted(net).train()
        if checkpointed:
            model.net.gradient_checkpointing_enable()
            assert model.net.is_gradient_checkpointing
        model.elbo(inputs, torch.arange(B) % C, n_data=9).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][key], gradient, rtol=1e-4, atol=1e-6), key


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama"])
def test_models_with_lora_convert_too(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    net, inputs = _made(name)
    targets = {"BERT": ["query", "value"], "GPT-2": ["c_attn"], "Llama": ["q_proj", "v_proj"]}[name]
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out=name == "GPT-2")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(net), config).eval()
    model = converted(adapted)
    assert sum("lora_A" in layer for layer in model.latents) == len(targets) * 2
    assert [n for n in model.net.state_dict() if ".latent." not in n] == list(adapted.state_dict())
    with torch.no_grad():
        rows = model.draw_logits(inputs, samples=1, batch_size=99)
        for k, row in enumerate(rows):
            assert torch.allclose(model.draw(k)(**inputs).logits, row, atol=2e-5)
    model.save_pretrained(tmp_path, latents_only=True)
    assert torch.equal(ibnn.load(tmp_path, adapted).eval()(**inputs), model.eval()(**inputs))
    model.train().elbo(inputs, torch.arange(B) % C, n_data=9, beta=0.0).loss.backward()
    assert all(latent.mean.grad.ne(0).any() for latent in model.latents.values())
    trained = [n for n, p in model.net.named_parameters() if p.grad is not None and ".latent." not in n]
    assert trained
    assert all("lora" in parameter for parameter in trained)  # the model's own weights stay frozen
    model.set_posterior(mean=1.0, std=0.0)
    with torch.no_grad():
        assert torch.allclose(model.draw_logits(inputs, samples=1)[0], adapted(**inputs).logits, atol=1e-5)


def _with_head(name: str = "BERT") -> tuple[Any, Batch]:
    """A model with two LoRA adapters for classification: peft keeps a copy of the head for each, and the original."""
    peft = pytest.importorskip("peft")
    net, inputs = _made(name)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(net), config)
    adapted.add_adapter("other", config)
    for parameter in adapted.base_model.model.classifier.parameters():  # so that the copies differ
        nn.init.normal_(parameter, std=0.5)
    return adapted.eval(), inputs


@pytest.mark.parametrize("name", ["BERT", "RoBERTa"])  # a head of one layer, and of two
def test_the_head_that_an_adapter_saves_is_the_one_converted(name: str, tmp_path: Path) -> None:
    adapted, inputs = _with_head(name)
    for active, idle in (("default", "other"), ("other", "default")):
        adapted.set_adapter(active)
        planned = ibnn.plan(adapted)
        heads = [layer.name for layer in planned.layers if ".classifier." in layer.name]
        assert heads
        assert all(f".modules_to_save.{active}" in head for head in heads)
        assert not any(f".{idle}" in layer.name for layer in planned.layers)
        reasons = {layer.reason for layer in planned.skipped if ".original_module" in layer.name}
        assert reasons == {"does not run with the adapters set as they are"}
        model = converted(adapted)
        with torch.no_grad():
            rows = model.draw_logits(inputs, samples=1, batch_size=99)
            for k, row in enumerate(rows):
                assert torch.allclose(model.draw(k)(**inputs).logits, row, atol=2e-5)
        mean = model.component(1)
        assert not any(isinstance(module, Latent) for module in mean.modules())
        for latents_only in (False, True):
            folder = tmp_path / active / str(latents_only)
            model.save_pretrained(folder, latents_only=latents_only)
            assert torch.equal(ibnn.load(folder, adapted).eval()(**inputs), model.eval()(**inputs))
        reverted = ibnn.revert(model)
        assert not any(isinstance(module, Latent) for module in reverted.modules())
        assert reverted.state_dict().keys() == adapted.state_dict().keys()
        with torch.no_grad():
            assert torch.equal(reverted(**inputs).logits, adapted(**inputs).logits)


def test_adapters_switched_and_switched_off() -> None:
    adapted, inputs = _with_head()
    model = converted(adapted, init_std=0.0)
    model.set_posterior(std=0.0)
    with torch.no_grad():
        for active in ("default", "other", "default"):
            for each in (model.net, adapted):
                each.set_adapter(active)
            assert torch.equal(model.draw_logits(inputs, samples=1)[0], adapted(**inputs).logits)
    assert ibnn.revert(model).state_dict().keys() == adapted.state_dict().keys()
    with adapted.disable_adapter():
        heads = [
            layer.name for layer in ibnn.plan(adapted).layers if "classifier" in layer.name or "lora" in layer.name
        ]
    assert heads == ["base_model.model.classifier.original_module"]
    merged = copy.deepcopy(adapted)
    merged.merge_adapter(["default"])
    assert not any("lora" in layer.name for layer in ibnn.plan(merged).layers)


def test_a_layer_that_also_reads_something_without_a_batch_is_named() -> None:
    """DeBERTa's relative attention sends the same embeddings of distances through its projections for all rows."""
    options = WIDE | TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True}
    config = hf.DebertaV2Config(**options, max_relative_positions=8, position_buckets=4)
    net, inputs = hf.DebertaV2ForSequenceClassification(config).eval(), _words()
    with pytest.raises(ValueError, match=r"input of layer 'deberta.*(query|key)_proj'.*exclude="):
        converted(net).train().elbo(inputs, torch.arange(B), n_data=9)
    model = converted(net, exclude=["*.query_proj", "*.key_proj"])
    model.train().elbo(inputs, torch.arange(B), n_data=9).loss.backward()
    assert all(latent.mean.grad is not None for latent in model.latents.values())
    assert converted(net).predict(inputs, samples=1).probs.shape == (B, C)  # one z for all rows fits any layer


def test_embeddings_of_words_get_a_latent_when_asked_for() -> None:
    net, inputs = _made("Llama")
    model = converted(net, include=[nn.Module, "model.embed_tokens"])
    assert "model.embed_tokens" in model.latents
    with torch.no_grad():
        rows = model.draw_logits(inputs, samples=1, batch_size=99)
        assert torch.allclose(model.draw(1)(**inputs).logits, rows[1], atol=2e-5)


LABELLED = {
    "BertForSequenceClassification": ("BertConfig", WIDE | TEXT),
    "BertForTokenClassification": ("BertConfig", WIDE | TEXT),
    "GPT2LMHeadModel": ("GPT2Config", MODELS["GPT-2"][2]),
    "GPT2ForSequenceClassification": ("GPT2Config", MODELS["GPT-2"][2]),  # picks its logits from those of all tokens
}


@pytest.mark.parametrize("name", LABELLED)
def test_labels_in_eval_mode_bring_the_loss_of_all_draws(name: str) -> None:
    torch.manual_seed(0)
    config, options = LABELLED[name]
    net = getattr(hf, name)(getattr(hf, config)(**options))
    tokens = "Sequence" not in name
    likelihood = ibnn.Categorical(axis=-1) if tokens else "categorical"
    model, inputs = ibnn.convert(net, components=2, seed=0, likelihood=likelihood).eval(), _words()
    model.eval_samples = 2
    labels = torch.randint(C, (B, 6) if tokens else (B,))
    labels[0] = -100 if tokens else labels[0]
    with torch.no_grad():
        alone, output = model(**inputs), model(**inputs, labels=labels)
    assert type(output) is type(net(**inputs, labels=labels))
    torch.testing.assert_close(output.logits, alone)
    draws = model.draw_logits(inputs, 2).double().detach()
    probs = draws.softmax(-1).mean(0)
    if name == "GPT2LMHeadModel":  # its class shifts the labels by one token
        probs, labels = probs[:, :-1], labels[:, 1:]
    kept = labels != -100
    expected = -probs[kept].gather(-1, labels[kept][..., None]).log().mean()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert isinstance(model(**inputs), Tensor)


def test_labels_that_a_network_takes_as_an_input_are_one() -> None:
    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, C)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.fc(x + labels[:, None])

    model, x = ibnn.convert(Conditional(), seed=0).eval(), torch.randn(B, 4)
    assert model(x, labels=torch.ones(B)).shape == (B, C)


# ----------------------------------------------------------------------------------------------------- language models

CAUSAL = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        MODELS["GPT-2"][2] | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "LlamaForCausalLM": ("LlamaConfig", LLAMA | {"use_cache": True, "bos_token_id": 0, "eos_token_id": 1}),
    "T5ForConditionalGeneration": ("T5Config", MODELS["T5"][2] | {"dropout_rate": 0.0}),
}


def _language_model(name: str) -> Any:
    torch.manual_seed(0)
    config, options = CAUSAL[name]
    net = getattr(hf, name)(getattr(hf, config)(**options)).eval()
    for parameter in net.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=1.0 / parameter[0].numel() ** 0.5)
    return net


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_labels_of_a_causal_model_are_shifted_as_its_class_does(name: str) -> None:
    net, inputs = _language_model(name), _words()
    labels = inputs["input_ids"].clone()
    labels[1, 2] = -100
    model = ibnn.convert(net, components=2, seed=0, init_std=0.0)
    model.set_posterior(std=0.0)
    assert (model.likelihood.axis, model.likelihood.next_token) == (-1, True)
    expected = net(**inputs, labels=labels).loss.item()
    found = model.elbo(inputs, labels, n_data=99)
    assert found.nll.item() == pytest.approx(expected, rel=1e-5)
    assert model.likelihood.count(labels) == B * 5 - 1
    sums, counts = model.likelihood.losses(model.draw_logits(inputs, 1)[None].detach(), labels)
    assert sums.sum().item() / counts.sum().item() == pytest.approx(expected, rel=1e-5)
    scores = model.likelihood.score(model.predict(inputs, samples=1), labels)
    assert scores["nll"] == pytest.approx(expected, rel=1e-5)
    following = torch.cat([inputs["input_ids"][:, 1:], torch.full((B, 1), -100)], 1)
    with pytest.raises(ValueError, match=r"`y`.*next_token=False"):
        model.elbo(inputs, following, n_data=99)
    by_hand = ibnn.convert(net, components=2, seed=0, init_std=0.0, likelihood=ibnn.Categorical(next_token=False))
    by_hand.set_posterior(std=0.0)
    following[1, 1] = -100
    assert by_hand.elbo(inputs, following, n_data=99).nll.item() == pytest.approx(expected, rel=1e-5)


def test_what_a_class_implies_is_saved_and_other_classes_imply_nothing(tmp_path: Path) -> None:
    net = _language_model("GPT2LMHeadModel")
    model = ibnn.convert(net, components=2, seed=0)
    model.save_pretrained(tmp_path)
    assert ibnn.load(tmp_path, net).likelihood.next_token is True
    assert (model.config, model.device, model.dtype) == (model.net.config, torch.device("cpu"), torch.float32)
    tagger = ibnn.convert(hf.BertForTokenClassification(hf.BertConfig(**(WIDE | TEXT))), components=2)
    assert (tagger.likelihood.axis, tagger.likelihood.next_token) == (-1, None)
    assert converted(_made("BERT")[0]).likelihood.axis is None


def _by_hand(nets: list[Any], ids: Tensor, steps: int, temperature: float) -> tuple[Tensor, ...]:
    """Generates greedily for one prompt from plain networks, without caches: tokens, log p, total, aleatoric."""
    seq2seq, told = nets[0].config.is_encoder_decoder, []
    sequence = torch.zeros(1, 1).long() if seq2seq else ids
    for _ in range(steps):
        inputs = {"input_ids": ids, "decoder_input_ids": sequence} if seq2seq else {"input_ids": sequence}
        probs = [(net(**inputs).logits[0, -1].double() / temperature).softmax(-1) for net in nets]
        mean = torch.stack(probs).mean(0)
        aleatoric = torch.stack([-(p * p.log()).sum() for p in probs]).mean()
        token = mean.argmax()
        told.append((token, mean[token].log(), -(mean * mean.log()).sum(), aleatoric))
        sequence = torch.cat([sequence, token[None, None]], 1)
        if token == nets[0].config.eos_token_id:
            break
    return tuple(torch.stack(part) for part in zip(*told, strict=True))


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("networks", ["all", "mean", "each"])
def test_generated_tokens_and_their_uncertainty_are_those_of_plain_networks(name: str, networks: str) -> None:
    net, ids = _language_model(name), torch.randint(5, 30, (B, 4), generator=torch.Generator().manual_seed(1))
    model = ibnn.convert(net, components=2, seed=0, init_std=0.5)
    model.set_posterior(std=0.2)
    model.likelihood.set_temperature(0.7)
    found = model.generate(ids, networks=networks, samples=2, seed=3, max_new_tokens=5)
    assert not model.net.training
    model.set_posterior(mean=model.posterior().mean.detach())  # `component` of the mean is made by hand
    for row in range(B):
        if networks == "all":
            nets = [model.draw(k, s, seed=3) for k in range(2) for s in range(2)]
        elif networks == "each":
            nets = [model.draw(row % 2, row // 2, seed=3)]
        else:
            mean = copy.deepcopy(model)
            mean.set_posterior(mean=model.posterior().mean.mean(0).detach())
            nets = [mean.component(0)]
        with torch.no_grad():
            tokens, *numbers = _by_hand(nets, ids[row : row + 1], 5, 0.7)
        length = len(tokens)
        assert found.mask[row].sum() == length
        assert torch.equal(found.tokens[row, :length], tokens)
        for values, expected in zip((found.log_probs, found.total, found.aleatoric), numbers, strict=True):
            torch.testing.assert_close(values[row, :length].double(), expected, rtol=1e-4, atol=1e-5)
            assert not values[row, length:].any()
        torch.testing.assert_close(found.of_sequence["total"][row].double(), numbers[1].sum(), rtol=1e-4, atol=1e-5)
    if networks == "all":
        assert found.epistemic[found.mask].max() > 1e-3


def test_sampled_tokens_follow_the_seed_and_what_cannot_be_generated_is_refused() -> None:
    model, ids = ibnn.convert(_language_model("GPT2LMHeadModel"), components=2, seed=0), torch.full((B, 3), 7)
    drawn = [model.generate(ids, do_sample=True, seed=s, max_new_tokens=6).tokens for s in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    with pytest.raises(ValueError, match="`num_beams`"):
        model.generate(ids, num_beams=2)
    with pytest.raises(AttributeError, match="generate"):
        ibnn.convert(nn.Linear(3, 2)).generate(ids)


# -------------------------------------------------------------------------------------------------------------- Trainer


def _trainer(model: ibnn.IBNN, rows: Any, folder: Path, **options: Any) -> Any:
    from ibnn.transformers import Trainer

    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "save_steps": 2}
    given = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 0.01, "seed": 0, **quiet, **options}
    return Trainer(model, hf.TrainingArguments(str(folder), **given), train_dataset=rows, eval_dataset=rows)


def _labelled_rows(tokens: bool) -> list[Batch]:
    ids = torch.randint(5, 30, (6, 5), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row if tokens else row[0] % C} for row in ids]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["BERT", *CAUSAL])
def test_the_trainer_minimises_the_elbo_and_saves_what_load_reads(name: str, tmp_path: Path) -> None:
    net = _made(name)[0] if name == "BERT" else _language_model(name)
    rows = _labelled_rows(name != "BERT")
    model = converted(net)
    trainer = _trainer(model, rows, tmp_path)
    assert "labels" in trainer.label_names
    batch = {key: torch.stack([row[key] for row in rows[:2]]) for key in rows[0]}
    model.train()
    fresh = copy.deepcopy(model)
    loss = trainer.compute_loss(model, batch)
    per_row = {"BERT": 1, "T5ForConditionalGeneration": 5}.get(name, 4)
    inputs = {"input_ids": batch["input_ids"]}
    if name.startswith("T5"):
        inputs["decoder_input_ids"] = torch.cat([torch.zeros(2, 1).long(), batch["labels"][:, :-1]], 1)
    torch.testing.assert_close(loss, fresh.elbo(inputs, batch["labels"], n_data=6 * per_row).loss)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    trainer.save_model(str(tmp_path / "model"))
    again = ibnn.load(tmp_path / "model", net).eval()
    assert torch.equal(again(**inputs), model.eval()(**inputs))
    resumed = converted(net)
    _trainer(resumed, rows, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (key, value), other in zip(model.state_dict().items(), resumed.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, msg=key)


def test_the_trainer_takes_converted_networks_only(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="`model`"):
        _trainer(_made("BERT")[0], _labelled_rows(False), tmp_path)  # type: ignore[arg-type]
