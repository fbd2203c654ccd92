"""CLINC150 on a pretrained MiniLM: 150 intents, and queries that belong to none of them.

    CLINC150=data_full.json MINILM=FOLDER python experiments/clinc.py [--seeds 0 1 2] [--methods plain …]

The embeddings and the first five blocks of MiniLM are frozen; their outputs are computed once and kept. Each method
trains the sixth block and a linear head on the mean of its outputs, on 50 queries per intent (7,500, the size of the
data set's small version), for 4 epochs at the default learning rate. Temperatures, noise, thresholds and p-values come
from the 3,000 validation queries. The 4,500 test queries and the 1,000 out-of-scope ones are scored once; no score is
fitted to out-of-scope queries. MC-dropout has BERT's own rate, 0.1; no rate was searched. Answers of random methods
have 8 draws. The threshold for 5 % false alarms is the 95 % quantile of a score over validation queries; for novelty it
is a p-value of 0.05. Writes results/clinc.json.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Results, scores
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModel, AutoTokenizer

import ibnn
from ibnn import metrics
from ibnn.baselines import MCDropout, Plain
from ibnn.inputs import split_inputs
from ibnn.likelihood import Categorical
from ibnn.likelihood.temperature import best_temperature
from ibnn.novelty.measure import see
from ibnn.novelty.nodes import observable
from ibnn.novelty.reference import shrunk_covariance

CACHE = Path(os.environ.get("IBNN_CACHE", Path(__file__).parent / "cache")) / "clinc"
PER_INTENT = 50  # training queries, of 100: those of the small version of CLINC150
BATCH, EPOCHS = 32, 4
RATE = 0.1  # MC-dropout's: BERT's own
DRAWS = 8
ALARMS = 0.05
HELD_OUT = 1_000  # validation queries that `calibrate` takes
TAUGHT = 3_000  # training queries that the one-pass network learns from


class Queries(Dataset[dict[str, Tensor]]):
    """What the frozen blocks make of queries, and their labels; in the order of their lengths."""

    def __init__(self, hidden: list[Tensor], labels: Tensor) -> None:
        order = sorted(range(len(hidden)), key=lambda row: len(hidden[row]))
        self.hidden, self.labels = [hidden[row] for row in order], labels[order]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"hidden": self.hidden[row], "labels": self.labels[row]}

    def loader(self) -> DataLoader[Any]:
        """Returns all queries, in batches of similar lengths."""
        return DataLoader(self, BATCH, collate_fn=padded)

    def shuffled(self) -> DataLoader[Any]:
        """Returns batches to train on: queries of similar lengths, in another order for each epoch."""
        return DataLoader(self, batch_sampler=Shuffled(len(self)), collate_fn=padded)  # type: ignore[arg-type]

    def some(self, rows: int) -> "Queries":
        """Returns queries that are chosen at random."""
        chosen = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))[:rows]
        return Queries([self.hidden[row] for row in chosen.tolist()], self.labels[chosen])

    def inputs(self) -> dict[str, Tensor]:
        """Returns all queries as one batch without labels."""
        return split_inputs(padded(list(self)))  # type: ignore[no-any-return, call-overload]


class Shuffled:
    """Batches of rows that are sorted by length: 20 batches at a time are shuffled, sorted and cut."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return -(-self.rows // BATCH)

    def __iter__(self) -> Iterator[list[int]]:
        lots = torch.randperm(self.rows).split(20 * BATCH)
        batches = list(chain.from_iterable(lot.sort().values.split(BATCH) for lot in lots))
        yield from (batches[number].tolist() for number in torch.randperm(len(batches)))


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns a batch with a mask that is 1 where a query has tokens."""
    hidden = nn.utils.rnn.pad_sequence([row["hidden"] for row in rows], batch_first=True)
    lengths = torch.tensor([len(row["hidden"]) for row in rows])
    mask = (torch.arange(hidden.shape[1]) < lengths[:, None]).long()
    return {"hidden": hidden, "attention_mask": mask, "labels": torch.stack([row["labels"] for row in rows])}


class Intents(nn.Module):
    """The last block of MiniLM, and a linear head on the mean over tokens."""

    def __init__(self, block: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.block, self.head = block, nn.Linear(width, classes)

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns class scores of outputs (B, T, D) of the block before, with a mask (B, T)."""
        out = self.block(hidden, attention_mask[:, None, None].bool())
        weight = attention_mask[..., None].to(hidden)
        return self.head(((out[0] if isinstance(out, tuple) else out) * weight).sum(1) / weight.sum(1))  # type: ignore[no-any-return]


class Task(NamedTuple):
    """Queries of all kinds, and what makes a new network with the pretrained block."""

    train: Queries
    valid: Queries
    test: Queries
    outside: Queries
    make: Callable[[int], Intents]


def read() -> Task:
    """Reads the queries and runs the frozen blocks, unless their outputs are kept."""
    bert = AutoModel.from_pretrained(os.environ["MINILM"], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    bert.eval()
    *frozen, last = bert.encoder.layer
    parts = json.loads(Path(os.environ["CLINC150"]).read_text(encoding="utf-8"))
    names = sorted({intent for _, intent in parts["train"]})
    kept = {}
    for part in ("train", "val", "test", "oos_test"):
        path = CACHE / f"{part}.pt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(frozen_outputs(bert, frozen, [text for text, _ in parts[part]]), path)
        labels = [names.index(intent) if intent in names else 0 for _, intent in parts[part]]
        outputs = torch.load(path)
        rows = _first(labels) if part == "train" else list(range(len(labels)))
        kept[part] = Queries([outputs[row] for row in rows], torch.tensor(labels)[rows])

    def make(seed: int) -> Intents:
        torch.manual_seed(seed)
        block = type(last)(bert.config, layer_idx=5)
        block.load_state_dict(last.state_dict())
        return Intents(block, bert.config.hidden_size, len(names))

    return Task(kept["train"], kept["val"], kept["test"], kept["oos_test"], make)


def _first(labels: list[int]) -> list[int]:
    """Returns the rows of the first queries of each intent."""
    counts: Counter[int] = Counter()
    rows = []
    for row, label in enumerate(labels):
        counts[label] += 1
        if counts[label] <= PER_INTENT:
            rows.append(row)
    return rows


@torch.no_grad()
def frozen_outputs(bert: Any, frozen: list[nn.Module], texts: list[str]) -> list[Tensor]:
    """Returns the outputs (T, D) of all blocks but the last, without padding."""
    tokenizer: Any = AutoTokenizer.from_pretrained(os.environ["MINILM"])
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    found: dict[int, Tensor] = {}
    for rows in (order[start : start + 256] for start in range(0, len(order), 256)):
        batch = tokenizer([texts[row] for row in rows], padding=True, return_tensors="pt")
        hidden, mask = bert.embeddings(batch["input_ids"]), batch["attention_mask"]
        for block in frozen:
            out = block(hidden, mask[:, None, None].bool())
            hidden = out[0] if isinstance(out, tuple) else out
        found |= {row: hidden[n, : mask[n].sum()].clone() for n, row in enumerate(rows)}
    return [found[row] for row in range(len(texts))]


# ------------------------------------------------------------------------------------------------------ the methods


def fitted(model: Any, task: Task, name: str, seed: int) -> Any:
    """Trains a model, or reads it from its folder if it was trained before."""
    options: Any = {"epochs": EPOCHS, "evaluate_every": EPOCHS, "eval_samples": 1, "seed": seed, "quiet": True}
    folder = CACHE / f"{name}-{seed}"
    ibnn.fit(model, task.train.shuffled(), task.valid.loader(), run_dir=folder, novelty=False, **options)
    return model.eval()


def plain(task: Task, seed: int) -> Plain:
    """A plain network."""
    return fitted(Plain(task.make(seed)), task, "plain", seed)  # type: ignore[no-any-return]


def calibrated(task: Task, seed: int) -> Any:
    """The plain network after `ibnn.calibrate`."""
    model = ibnn.convert(plain(task, seed).net, seed=seed)
    valid = task.valid.some(HELD_OUT)
    print(ibnn.calibrate(model, (valid.inputs(), valid.labels), samples=DRAWS // 8, progress=False), flush=True)
    return model


def implicit(task: Task, seed: int) -> Any:
    """An iBNN with the default recipe, from the pretrained block and a new head."""
    return fitted(ibnn.convert(task.make(seed), seed=seed), task, "ibnn", seed)


def dropout(task: Task, seed: int) -> Any:
    """MC-dropout."""
    return fitted(MCDropout(task.make(seed), rate=RATE), task, "dropout", seed)


def ensemble(task: Task, seed: int, members: int = 3) -> Any:
    """Several plain networks: those of the rows, each without its temperature."""
    nets = [plain(task, number).net for number in range(seed, seed + members)]
    return ibnn.Ensemble([Plain(net) for net in nets])


def one_pass(task: Task, seed: int) -> Any:
    """The iBNN distilled into one pass, by training queries without labels."""
    taught = task.train.some(TAUGHT).inputs()
    return ibnn.distil(implicit(task, seed), taught, samples=DRAWS // 8, seed=seed, progress=False)


METHODS: dict[str, Callable[[Task, int], Any]] = {
    "plain": plain,
    "calibrate": calibrated,
    "iBNN-8": implicit,
    "MC-dropout": dropout,
    "iBNN-8, one pass": one_pass,
    "3 plain networks": ensemble,
}


# ------------------------------------------------------------------------------------------------------- the scores


def last_layer(model: Any, train: Queries) -> Callable[[Queries], dict[str, Tensor]]:
    """Energy, and the distance to the nearest class in the last layer's input, of the network at its mean."""
    name = list(observable(model.net))[-1]
    layers, axes = {name: model.net.get_submodule(name)}, {name: 0}

    def seen(queries: Queries) -> tuple[Tensor, Tensor]:
        passes = [see(model, split_inputs(batch), layers, axes) for batch in queries.loader()]
        return torch.cat([p.summaries[name] for p in passes]).double(), torch.cat([p.output for p in passes])

    known, labels = seen(train)[0], train.labels
    means = torch.stack([known[labels == c].mean(0) for c in range(int(labels.max()) + 1)])
    inverse = torch.linalg.pinv(shrunk_covariance(known - means[labels]))

    def found(queries: Queries) -> dict[str, Tensor]:
        rows, logits = seen(queries)
        gap = [torch.einsum("bci,ij,bcj->bc", d, inverse, d).amin(1) for d in _gaps(rows, means)]
        return {"energy": -logits.logsumexp(1), "last layer, Mahalanobis": torch.cat(gap)}

    return found


def _gaps(rows: Tensor, means: Tensor) -> Iterator[Tensor]:
    return (part[:, None] - means for part in rows.split(200))


def cell(name: str, seed: int, task: Task) -> dict[str, Any]:
    """Scores of one method: in scope, after one more temperature, and for queries out of scope by several scores."""
    began = time.process_time()
    model = METHODS[name](task, seed)
    seconds, members = time.process_time() - began, name == "3 plain networks"
    samples = DRAWS // model.components if model.random else 1
    if not members:
        ibnn.fit_novelty(model, task.train.loader(), task.valid.inputs())
    parts = {"valid": task.valid, "test": task.test, "outside": task.outside}
    answers: Any = {part: model.predict(q.loader(), samples=samples, progress=False) for part, q in parts.items()}
    logs = {part: answer.log_probs for part, answer in answers.items()}
    temperature = best_temperature(Categorical(), logs["valid"][None, None], task.valid.labels)
    found: dict[str, Any] = {
        "test": scores(logs["test"], task.test.labels),
        "tempered": scores(logs["test"] / temperature, task.test.labels),
        "valid": scores(logs["valid"], task.valid.labels),
        "own temperature": float(model.likelihood.temperature),
        "temperature": temperature,
        "forwards": model.components * samples,
        "CPU seconds to make": round(seconds, 1),
    }
    rows = {}
    for part, answer in answers.items():
        tempered = (logs[part] / temperature).log_softmax(1)
        rows[part] = {"entropy": answer.total, "entropy + T": torch.special.entr(tempered.exp()).sum(1)}
        if model.components * samples > 1 or name.endswith("one pass"):
            rows[part]["epistemic"] = answer.epistemic
        if not members:
            rows[part]["novelty"] = -answer.p_value
    if name in ("plain", "iBNN-8", "MC-dropout"):
        further = last_layer(model, task.train)
        for part, queries in parts.items():
            rows[part] |= further(queries)
    found["out of scope"] = {score: _detected(rows, score) for score in rows["test"]}
    return found


def _detected(rows: dict[str, dict[str, Tensor]], score: str) -> dict[str, float]:
    valid, test, outside = (rows[part][score].double() for part in ("valid", "test", "outside"))
    threshold = -ALARMS if score == "novelty" else float(valid.quantile(1 - ALARMS))
    caught = (lambda values: values >= threshold) if score == "novelty" else (lambda values: values > threshold)
    return {
        "auroc": metrics.auroc(test, outside),
        "fpr95": metrics.fpr_at_95_tpr(test, outside),
        "recall": float(caught(outside).double().mean()),
        "false alarms": float(caught(test).double().mean()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results, task = Results("clinc", str(__doc__)), read()
    for seed in options.seeds:
        for name in options.methods:
            if name != "3 plain networks" or seed == 0:
                results.run(f"{name} / seed {seed}", partial(cell, name, seed, task))
