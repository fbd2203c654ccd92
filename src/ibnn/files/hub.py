"""Shares models on the Hugging Face hub."""

import functools
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from torch import nn

from ibnn.errors import complaint
from ibnn.files.model_folder import CONFIG, FILES, check_replaceable, read_config
from ibnn.files.saving import Architecture, Folder, load, save_pretrained
from ibnn.files.sealed import extra
from ibnn.network import IBNN
from ibnn.novelty import Reference


def push_to_hub(
    model: IBNN,
    repo_id: str,
    *,
    latents_only: bool = False,
    architecture: Architecture | None = None,
    private: bool | None = None,
    revision: str | None = None,
) -> str:
    """Saves a model to a repository of the Hugging Face hub ("user/name"), made if need be; returns its address.

    A model card is written if there is none. Log in first (`hf auth login`, or the variable HF_TOKEN).

    Args:
        model: As in `save_pretrained`, and so are `latents_only` and `architecture`.
        repo_id: The repository.
        latents_only: Leaves the weights out.
        architecture: How `load` builds the network.
        private: Whether a new repository is private; None for the account's default.
        revision: Branch to write to.
    """
    api = extra("huggingface_hub").HfApi()
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder, latents_only=latents_only, architecture=architecture)
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        if api.file_exists(repo_id, CONFIG, revision=revision):
            check_replaceable(Path(api.hf_hub_download(repo_id, CONFIG, revision=revision)))
        if not api.file_exists(repo_id, "README.md", revision=revision):
            card = _card(read_config(Path(folder)), repo_id, model.reference)
            Path(folder, "README.md").write_text(card, encoding="utf-8")
        api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision)
    return str(url)


def from_pretrained(
    source: Folder, net: nn.Module | None = None, *, revision: str | None = None, **options: Any
) -> IBNN:
    """Loads a model as `load` does, with its options, from a folder or a repository of the hub ("user/name").

    `revision` is a branch, tag or commit of the repository; only a commit stands for the same model for good.
    """
    folder = Path(source)
    if not folder.is_dir():
        if not isinstance(source, str) or source.count("/") != 1 or source.startswith((".", "~", "/")):
            raise FileNotFoundError(complaint("source", "a folder or user/name", repr(str(source)), "Check the path."))
        fetch = functools.partial(extra("huggingface_hub").snapshot_download, source, revision=revision)
        config = read_config(Path(fetch(allow_patterns=[CONFIG])))
        folder = Path(fetch(allow_patterns=[CONFIG, FILES[config["latents_only"]]]))
    return load(folder, net, **options)


def _card(config: dict[str, Any], repo_id: str, reference: Reference | None) -> str:
    """Returns the text of a model card."""
    what = "latents only, for the network they were trained on" if config["latents_only"] else "a whole model"
    built = "architecture" in config and not config["latents_only"]
    novelty = "not told: the model has seen no reference data"
    if reference is not None:
        novelty = f"`prediction.p_value`, p-values among {reference.ranked:,} held-out inputs"
    card = (resources.files("ibnn.files") / "templates/model_card.md").read_text(encoding="utf-8")
    return card.format(
        config=config,
        nodes=sum(config["layers"].values()),
        layers=len(config["layers"]),
        repo_id=repo_id,
        what=what,
        net="" if built else "net = ...  # the plain network, built as it was when the model was made\n",
        argument="" if built else ", net",
        novelty=novelty,
    )
