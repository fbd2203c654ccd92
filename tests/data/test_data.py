import gzip
import os
import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from ibnn import data
from ibnn.data import Folder, Images, Split, hold_out, load_cifar10, load_cifar100, load_idx, subset
from ibnn.data.sets import KNOWN
from ibnn.data.table_file import numbers, read_cells
from ibnn.errors import DamagedError

FOUR_PARTS = r"Expected `.*` to be .*, but got .*\. \w+"


def idx(values: Tensor, *, magic: bytes | None = None) -> bytes:
    header = magic or bytes([0, 0, 8, values.dim()])
    return header + struct.pack(f">{values.dim()}I", *values.shape) + bytes(values.to(torch.uint8).flatten().tolist())


def write_idx(folder: Path, prefix: str, images: Tensor, labels: Tensor) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
        (folder / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(values)))


def write_cifar(path: Path, labels: Tensor, images: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(torch.cat([labels.to(torch.uint8), images.flatten(1)], 1).flatten().tolist()))


def picture(rows: int, *shape: int) -> Tensor:
    return torch.randint(256, (rows, *shape), dtype=torch.uint8)


def made(rows: int = 50, classes: int = 5, shape: tuple[int, ...] = (1, 6, 6)) -> Split:
    return Split(picture(rows, *shape), torch.randint(classes, (rows,)))


# -------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("name", data.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert getattr(data, name).__doc__


def test_idx(tmp_path: Path) -> None:
    images, labels = picture(3, 4, 5), torch.tensor([7, 0, 9])
    write_idx(tmp_path, "train", images, labels)
    split = load_idx(tmp_path, train=True)
    assert torch.equal(split.images, images[:, None])
    assert torch.equal(split.labels, labels)
    assert (split.images.dtype, split.labels.dtype) == (torch.uint8, torch.int64)


@pytest.mark.parametrize(
    "content",
    [  # with ids of their own: gzip writes the time into its header, and all workers must collect the same tests
        pytest.param(gzip.compress(idx(torch.zeros(3, 4, 4), magic=b"\0\0\x0d\3")), id="floats"),
        pytest.param(gzip.compress(idx(torch.zeros(3, 16))), id="two dimensions"),
        pytest.param(gzip.compress(idx(torch.zeros(3, 4, 4))[:-1]), id="a value missing"),
        pytest.param(gzip.compress(idx(torch.zeros(3, 4, 4)) + b"\0"), id="one value too many"),
        pytest.param(gzip.compress(idx(torch.zeros(0, 4, 4))), id="no values"),
        pytest.param(gzip.compress(b"\0\0\x08\3\0"), id="half a header"),
        pytest.param(gzip.compress(b""), id="empty"),
        pytest.param(gzip.compress(idx(torch.zeros(3, 4, 4)))[:-9], id="truncated"),
        pytest.param(gzip.compress(idx(torch.zeros(3, 4, 4)))[:12] + b"\xff" * 20, id="damaged"),
        pytest.param(b"<html>", id="not gzip"),
    ],
    ids=len,  # the bytes themselves have the time in them, and workers would not agree on their names
)
def test_broken_idx_is_named(tmp_path: Path, content: bytes) -> None:
    write_idx(tmp_path, "t10k", picture(3, 4, 4), torch.arange(3))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(ValueError, match=FOUR_PARTS) as error:
        load_idx(tmp_path, train=False)
    assert "t10k-images-idx3-ubyte.gz" in str(error.value)


@pytest.mark.parametrize("promised", [48, 2**32 - 1], ids=["small", "huge"])
def test_a_gzip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, promised: int) -> None:
    write_idx(tmp_path, "t10k", picture(3, 4, 4), torch.arange(3))
    with gzip.open(tmp_path / "t10k-images-idx3-ubyte.gz", "wb", compresslevel=1) as file:
        file.write(b"\0\0\x08\3" + struct.pack(">3I", promised, 1, 1))
        for _ in range(256):
            file.write(bytes(1 << 20))  # 256 MiB, packed into about one
    tracemalloc.start()
    with pytest.raises(DamagedError, match="t10k-images"):
        load_idx(tmp_path, train=False)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


def test_idx_counts_must_agree(tmp_path: Path) -> None:
    write_idx(tmp_path, "train", picture(3, 4, 4), torch.arange(2))
    with pytest.raises(ValueError, match="3 images and 2 labels"):
        load_idx(tmp_path, train=True)


def test_cifar10(tmp_path: Path) -> None:
    images, labels = picture(10, 3, 32, 32), torch.arange(10)[:, None]
    for i in range(5):
        write_cifar(tmp_path / f"data_batch_{i + 1}.bin", labels[2 * i : 2 * i + 2], images[2 * i : 2 * i + 2])
    write_cifar(tmp_path / "test_batch.bin", labels[:1], images[:1])
    train, test = load_cifar10(tmp_path, train=True), load_cifar10(tmp_path, train=False)
    assert torch.equal(train.images, images)
    assert torch.equal(train.labels, labels[:, 0])
    assert torch.equal(test.images, images[:1])


def test_cifar100_uses_fine_labels(tmp_path: Path) -> None:
    images, labels = picture(2, 3, 32, 32), torch.tensor([[19, 3], [0, 99]])
    write_cifar(tmp_path / "test.bin", labels, images)
    split = load_cifar100(tmp_path, train=False)
    assert torch.equal(split.images, images)
    assert split.labels.tolist() == [3, 99]


@pytest.mark.parametrize("content", [b"", b"\0" * 3074, b"\0" * 3073 * 2 + b"\0", b"\x0a" + b"\0" * 3072])
def test_broken_cifar_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "test_batch.bin").write_bytes(content)
    with pytest.raises(ValueError, match=FOUR_PARTS) as error:
        load_cifar10(tmp_path, train=False)
    assert "test_batch.bin" in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train\.bin"):
        load_cifar100(tmp_path, train=True)


# -------------------------------------------------------------------------------------------------------- image folders


def write_pictures(root: Path) -> None:
    from PIL import Image

    for part, name, file, colour, size in (
        ("train", "cat", "b.png", (250, 0, 0), (40, 20)),
        ("train", "cat", "a.JPEG", (0, 250, 0), (20, 40)),
        ("train", "ant", "x.jpg", (0, 0, 250), (16, 16)),
        ("val", "cat", "z.png", (9, 9, 9), (30, 30)),
    ):
        (root / part / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, colour).save(root / part / name / file)
    (root / "train" / "cat" / "notes.txt").write_text("not an image")


def test_folder(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    train, val = (Folder(tmp_path, train=part, size=14) for part in (True, False))
    assert [path.name for path in train.paths] == ["x.jpg", "a.JPEG", "b.png"]
    assert train.classes == val.classes == ("ant", "cat")  # the same labels though val has no ants
    assert (train.labels.tolist(), val.labels.tolist()) == ([0, 1, 1], [1])
    image, label = train[2]
    assert torch.equal(image, torch.tensor([250, 0, 0], dtype=torch.uint8).view(3, 1, 1).expand(3, 14, 14))
    assert (int(label), len(train)) == (1, 3)
    split = train.rows(torch.arange(len(train)))
    assert all(torch.equal(split.images[i], train[i][0]) for i in range(3))
    lazy, held = (Images(d, mean=(0.5,) * 3, std=(0.25,) * 3) for d in (train, split))
    assert torch.equal(lazy.__getitems__([2, 0])[0], held.__getitems__([2, 0])[0])


def test_folder_cuts_the_centre(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "train" / "a").mkdir(parents=True)
    ramp = torch.arange(32, dtype=torch.uint8).repeat(16, 1)  # 16 high, 32 wide, value = column
    Image.frombytes("L", (32, 16), bytes(ramp.flatten().tolist())).save(tmp_path / "train" / "a" / "a.png")
    image, _ = Folder(tmp_path, train=True, size=14)[0]  # 8/7 of 14 are 16: not resized
    assert torch.equal(image, torch.arange(9, 23, dtype=torch.uint8).expand(3, 14, 14))


def test_folder_puts_transparent_images_on_white(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.new("RGBA", (4, 4), (255, 0, 0, 51)).save(tmp_path / "train" / "a" / "0.png")
    image, _ = Folder(tmp_path, train=True, size=4)[0]
    assert image.flatten(1).unique(dim=1).flatten().tolist() == [255, 204, 204]


def test_unreadable_image_is_named(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    whole = (tmp_path / "train" / "cat" / "b.png").read_bytes()
    for content in (b"not an image", whole[:50], b""):
        (tmp_path / "train" / "cat" / "b.png").write_bytes(content)
        with pytest.raises(ValueError, match=FOUR_PARTS) as error:
            Folder(tmp_path, train=True, size=14)[2]
        assert "b.png" in str(error.value)


def test_folder_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=FOUR_PARTS):
        Folder(tmp_path, train=True, size=14)
    with pytest.raises(ValueError, match=FOUR_PARTS):
        Folder(tmp_path, train=True, size=0)


# ----------------------------------------------------------------------------------------------------------------- sets


def test_digits_are_fixed_stratified_and_normalised() -> None:
    from sklearn.datasets import load_digits

    first, again = data.load("digits"), data.load("digits")
    assert torch.equal(first.train.images, again.train.images)
    whole = torch.cat([first.train.images, first.test.images]).flatten(1)
    source = torch.from_numpy(load_digits().data)
    ours, theirs = (sorted(map(tuple, rows.tolist())) for rows in (whole, (source * 255 / 16).round()))
    assert ours == theirs
    assert (
        first.test.labels.bincount() - torch.from_numpy(load_digits().target).bincount() * 360 / 1797
    ).abs().max() < 1
    x = first.normalise(first.train.images)
    assert abs(x.mean()) < 1e-3
    assert abs(x.std() - 1) < 1e-3


@pytest.mark.parametrize("name", [name for name in data.names() if name != "digits"])
def test_load_by_name(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=FOUR_PARTS) as error:
        data.load(name, tmp_path)
    assert str(error.value).endswith(f"Run: ibnn data get {name}")
    assert not next(row for row in data.status(tmp_path) if row.name == name).found
    folder = tmp_path / KNOWN[name].where
    if "mnist" in name:
        for prefix in ("train", "t10k"):
            write_idx(folder, prefix, picture(4, 28, 28), torch.arange(4))
    else:
        for file in KNOWN[name].kept:
            write_cifar(tmp_path / file, torch.zeros(4, 1 if name == "cifar-10" else 2), picture(4, 3, 32, 32))
    monkeypatch.setenv("IBNN_DATA", str(tmp_path))
    found, row = data.load(name), next(row for row in data.status() if row.name == name)
    assert len(found.test.labels) == 4
    assert len(found.mean) == len(found.std) == found.train.images.shape[1]
    assert len(found.classes) == len(set(found.classes)) == (100 if name == "cifar-100" else 10)
    assert (row.found, row.bytes) == (True, sum(path.stat().st_size for path in folder.iterdir()))


def test_folder_argument_environment_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("IBNN_DATA", raising=False)
    for folder, env, expected in ((None, "", "data"), (None, "there", "there"), ("here", "there", "here")):
        monkeypatch.setenv("IBNN_DATA", env)
        with pytest.raises(FileNotFoundError, match=f"but got {expected}\\."):
            data.load("mnist", folder)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=FOUR_PARTS):
        data.load("cifar")


@pytest.mark.skipif("IBNN_DATA" not in os.environ, reason="needs the real files in IBNN_DATA")
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar-10", "cifar-100"])
def test_real_sets(name: str) -> None:
    if not next(row for row in data.status() if row.name == name).found:
        pytest.skip(f"no {name}")
    found = data.load(name)
    assert (len(found.train.labels), len(found.test.labels)) == (50_000 + 10_000 * ("mnist" in name), 10_000)
    for channel, (mean, std) in enumerate(zip(found.mean, found.std, strict=True)):
        counts = found.train.images[:, channel].flatten().bincount(minlength=256).double()
        values, total = torch.arange(256).double() / 255, counts.sum()
        ours = (counts * values).sum() / total
        assert abs(ours - mean) < 6e-5
        assert abs(((counts * values**2).sum() / total - ours**2).sqrt() - std) < 6e-5
    assert found.train.labels.bincount().float().std() < 400


# ---------------------------------------------------------------------------------------------------------------- parts


@given(st.lists(st.integers(0, 6), min_size=2, max_size=60), st.data())
def test_hold_out(labels: list[int], draw: st.DataObject) -> None:
    rows, seed = draw.draw(st.integers(1, len(labels) - 1)), draw.draw(st.integers(0, 3))
    split = Split(torch.arange(len(labels)).view(-1, 1, 1, 1).to(torch.uint8), torch.tensor(labels))
    train, valid = hold_out(split, rows, seed)
    a, b = train.images.flatten().tolist(), valid.images.flatten().tolist()
    assert len(b) == rows
    assert sorted(a + b) == list(range(len(labels)))  # disjoint, and nothing lost
    for part, size in ((train, len(a)), (valid, rows)):
        share = split.labels.bincount(minlength=7) * (size / len(labels))
        assert (part.labels.bincount(minlength=7) - share).abs().max() < 1
        assert torch.equal(part.labels, split.labels[part.images.flatten().long()])
    assert torch.equal(hold_out(split, rows, seed)[1].images, valid.images)
    assert torch.equal(subset(split, rows, seed).images, valid.images)


def test_seeds_choose_otherwise() -> None:
    split = made(200)
    assert not torch.equal(subset(split, 50, 0).images, subset(split, 50, 1).images)
    order = torch.stack(
        [(subset(split, 100, seed).images[:, None] == split.images).all((2, 3, 4)).any(0) for seed in range(200)]
    )
    share = order.float().mean(0)  # each row is chosen as often as any other: within 4 standard errors
    assert (share - 0.5).abs().max() < 4.5 * (0.25 / 200) ** 0.5


@pytest.mark.parametrize("rows", [0, 50, -1])
def test_parts_of_impossible_size(rows: int) -> None:
    with pytest.raises(ValueError, match=FOUR_PARTS):
        hold_out(made(50), rows, 0)


def test_a_subset_may_be_all() -> None:
    split = made(50)
    assert torch.equal(subset(split, 50, 0).images, split.images)
    with pytest.raises(ValueError, match=r"`examples` .*51"):
        subset(split, 51, 0)


# ------------------------------------------------------------------------------------------------------------- embedded


def test_two_moons_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import make_moons

    x, y = data.two_moons(51, noise=0.0, seed=3)
    theirs, classes = make_moons(51, shuffle=False)
    ours = sorted((label, *point) for point, label in zip(x.tolist(), y.tolist(), strict=True))
    expected = sorted((label, *point) for point, label in zip(theirs.tolist(), classes.tolist(), strict=True))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), atol=1e-6, rtol=0)
    noisy, again = data.two_moons(4000, 0.2, 3), data.two_moons(4000, 0.2, 3)
    assert torch.equal(noisy[0], again[0])
    spread = (noisy[0] - data.two_moons(4000, 0.0, 3)[0]).std()
    assert abs(spread - 0.2) < 4 * 0.2 / (2 * 8000) ** 0.5


def test_toy_regression() -> None:
    x, y = data.toy_regression(10_000, seed=1)
    assert x.shape == y.shape == (10_000, 1)
    assert x.abs().max() <= 4
    assert abs(x.std() - 8 / 12**0.5) < 0.05
    assert abs((y - x**3).std() - 3) < 4 * 3 / 20_000**0.5
    assert torch.equal(data.toy_regression()[1], data.toy_regression(30, 0)[1])


# -------------------------------------------------------------------------------------------------------------- batches


def test_images_are_normalised() -> None:
    split = made(7, shape=(2, 5, 4))
    images = Images(split, mean=(0.2, 0.4), std=(0.5, 0.25))
    x, y = images.__getitems__([3, 0, 3])
    expected = (split.images[[3, 0, 3]].double() / 255 - torch.tensor([0.2, 0.4])[:, None, None]) / torch.tensor(
        [0.5, 0.25]
    )[:, None, None]
    torch.testing.assert_close(x.double(), expected, atol=1e-6, rtol=0)
    assert (x.dtype, x.is_contiguous()) == (torch.float32, True)
    assert torch.equal(y, split.labels[[3, 0, 3]])
    one, label = images[3]
    assert torch.equal(one, x[0])
    assert label == y[0]
    assert len(images) == 7


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("shape", [(1, 6, 6), (3, 8, 5)])
def test_augmentation_against_one_image_at_a_time(flip: bool, shape: tuple[int, ...]) -> None:
    split, rows = made(40, shape=shape), list(range(0, 40, 2))
    images = Images(split, mean=(0.4,) * shape[0], std=(0.3,) * shape[0], augment=True, flip=flip)
    torch.manual_seed(5)
    x, _ = images.__getitems__(rows)
    torch.manual_seed(5)
    down, right = torch.randint(9, (2, len(rows), 1))
    mirrored = torch.rand(len(rows)) < 0.5 if flip else torch.zeros(len(rows), dtype=torch.bool)
    for n, row in enumerate(rows):
        padded = torch.zeros(shape[0], shape[1] + 8, shape[2] + 8)  # black
        padded[:, 4:-4, 4:-4] = split.images[row].float() / 255
        i, j = int(down[n]), int(right[n])
        image = padded[:, i : i + shape[1], j : j + shape[2]]
        image = image.flip(2) if mirrored[n] else image
        torch.testing.assert_close(x[n], (image - 0.4) / 0.3, atol=1e-5, rtol=0)


def test_augmentation_moves_evenly() -> None:
    images = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    images[0, 0, 4, 4] = 255  # a dot in the middle can get to all 9 × 9 places
    dots = Images(Split(images, torch.zeros(1).long()), mean=(0.0,), std=(1.0,), augment=True)
    share = dots.__getitems__([0] * 8_100)[0].mean((0, 1))
    assert (share - 1 / 81).abs().max() < 4.5 * (1 / 81 / 8_100) ** 0.5


def test_augmentation_is_fixed_by_the_seed_and_leaves_the_data_alone() -> None:
    split = made(30, shape=(3, 8, 8))
    before = split.images.clone()
    images = Images(split, mean=(0.5,) * 3, std=(0.5,) * 3, augment=True)

    def batch(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return images.__getitems__(range(30))[0]

    assert torch.equal(batch(1), batch(1))
    assert not torch.equal(batch(1), batch(2))
    assert torch.equal(split.images, before)


def test_images_in_loaders() -> None:
    split = made(10)
    images = Images(split, mean=(0.5,), std=(0.5,))
    for source in (images, Subset(images, list(range(10)))):
        batches = list(DataLoader(source, batch_size=4, collate_fn=tuple))
        assert [len(y) for _, y in batches] == [4, 4, 2]
        assert torch.equal(torch.cat([x for x, _ in batches]), images.__getitems__(range(10))[0])


def test_one_mean_for_each_channel() -> None:
    with pytest.raises(ValueError, match="`mean and std`"):
        Images(made(), mean=(0.5,) * 3, std=(0.5,) * 3)


# ------------------------------------------------------------------------------------------------------- own tables


def table(folder: Path, text: str | bytes, name: str = "t.csv") -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


def lines(rows: int, target: Callable[[int], object], head: str = "a,b,y") -> str:
    return "\n".join([head, *(f"{i},{i % 7 - 0.5},{target(i)}" for i in range(rows))]) + "\n"


@pytest.mark.parametrize(
    "head", [b"", b"gr\xf6\xdfe,b\n", b"x,x,x\n", b"\xef\xbb\xbfa,2\n\n"], ids=["no", "latin", "long", "bom"]
)
def test_columns_by_order_need_no_header(tmp_path: Path, head: bytes) -> None:
    path = table(tmp_path, head + b'1,"2"\n\n3,4\n')
    cells = read_cells(path, named=False)
    assert numbers(path, cells, list(cells.columns), "").tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match=r"'x' in row 2, column '2'"):
        numbers(path, read_cells(table(tmp_path, head + b"1,2\n3,x\n"), named=False), ["2"], "")


def test_ten_thousand_columns_are_read_in_seconds(tmp_path: Path) -> None:
    columns = 10_000
    lines = [",".join(f"c{i}" for i in range(columns)) + ",y"]
    lines += [",".join(str(i + row) for i in range(columns)) + f",{row % 2}" for row in range(10)]
    started = time.process_time()
    found = data.read_table(table(tmp_path, "\n".join(lines)), "y")
    assert time.process_time() - started < 4  # quadratic time takes more than 7 s
    assert found.train.x.shape == (8, columns)
    assert torch.equal(found.train.x[:, 1:] - found.train.x[:, :-1], torch.ones(8, columns - 1))


def test_numbers_are_the_nearest_floats(tmp_path: Path) -> None:
    cells = ["0.1", "1e-300", "123456789.123456789", " 7 ", "-0.0", "2.2250738585072011e-308", "1E5", "4.35"]
    path = table(tmp_path, "a\n" + "\n".join(cells))
    assert numbers(path, read_cells(path), ["a"], "").flatten().tolist() == [float(cell) for cell in cells]


def test_a_table_is_split_once_and_standardised_by_its_training_rows(tmp_path: Path) -> None:
    path = table(tmp_path, lines(100, lambda i: "no" if i % 4 else "yes"))
    found = data.read_table(path, "y", test_share=0.4)
    assert (found.columns, found.classes) == (("a", "b"), ("no", "yes"))
    assert found.test.y.bincount().tolist() == [30, 10]  # of 75 and 25
    train, valid = found.split(examples=40, valid=8)
    assert valid is not None
    assert (train.y.bincount().tolist(), valid.y.bincount().tolist()) == ([24, 8], [6, 2])
    parts = [set(part.x[:, 0].tolist()) for part in (train, valid, found.test)]
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]
    again = data.read_table(path, "y", test_share=0.4)
    assert torch.equal(again.test.x, found.test.x)
    units = found.units(train)
    assert units.target is None
    assert units.centre == pytest.approx(train.x.double().mean(0).tolist())
    assert units.scale == pytest.approx(train.x.double().std(0, correction=0).tolist())
    everything = sorted(zip(*torch.cat([p.x for p in (found.train, found.test)]).T.tolist(), strict=True))
    assert everything == [(i, i % 7 - 0.5) for i in range(100)]
    for points in (train, found.test):
        assert torch.equal(points.y, (points.x[:, 0] % 4 == 0).long())  # rows keep their targets


def test_numbers_have_units_of_their_training_rows(tmp_path: Path) -> None:
    found = data.read_table(table(tmp_path, lines(50, lambda i: 0.25 * i * i)), "y")
    assert found.classes == ()
    assert len(found.test) == 10
    train, valid = found.split(None, 0)
    assert valid is None
    assert torch.equal(train.y[:, 0], 0.25 * train.x[:, 0] ** 2)
    target = found.units(train).target
    assert target is not None
    y = train.y.double()
    assert target == pytest.approx((float(y.mean()), spread := float(y.std(correction=0)), spread / 2))
    constant = data.read_table(table(tmp_path, "a,b,y\n" + "".join(f"{i},0.1,{i}.5\n" for i in range(9))), "y")
    assert constant.units(constant.train).scale[1] == 1.0


@pytest.mark.parametrize(
    ("target", "task", "classes"),
    [
        (lambda i: i % 20, None, tuple(map(str, range(20)))),  # in the order of numbers
        (lambda i: i % 21, None, ()),
        (lambda i: f"{i % 2}.0", None, ("0", "1")),
        (lambda i: f"{i % 2}.5", None, ()),
        (lambda i: i % 3, "numbers", ()),
        (lambda i: i % 25, "classes", tuple(map(str, range(25)))),
        (lambda i: "abc"[i % 3], None, ("a", "b", "c")),
        (lambda i: i % 2 == 0, None, ("False", "True")),
        (lambda i: 10**20 + i % 2, "classes", (str(10**20), str(10**20 + 1))),  # more than a float tells apart
        (lambda i: "7" if i % 2 else "other", "classes", ("7", "other")),
        (lambda i: '"x, ""y"""' if i % 2 else "é", None, ('x, "y"', "é")),
    ],
)
def test_a_target_is_taken_for_what_it_looks_like(
    target: Callable[[int], object], task: Any, classes: tuple[str, ...], tmp_path: Path
) -> None:
    assert data.read_table(table(tmp_path, lines(200, target)), "y", task=task).classes == classes


def test_other_ways_to_write_a_table(tmp_path: Path) -> None:
    plain = lines(20, lambda i: "pq"[i % 2])
    expected = data.read_table(table(tmp_path, plain), "y").train.x
    quoted = "\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in plain.split())
    for text in (b"\xef\xbb\xbf" + plain.encode(), plain.replace("\n", "\r\n"), quoted, plain.replace("\n", "\n\n")):
        assert torch.equal(data.read_table(table(tmp_path, text), "y").train.x, expected)
    named = data.read_table(table(tmp_path, plain.replace("a,b,y", ' a ,"b, c",y')), "y")
    assert named.columns == ("a", "b, c")
    assert data.read_table(table(tmp_path, plain), "y", ignore=["a"]).columns == ("b",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "t.csv. to be CSV"),
        ("a,b,y\n", "no row below the header"),
        ("a,b,y\n1,2,p\n1,2,q,3\n", "line 3"),
        ("a,b,y\n1,2,p\n1,2\n", "nothing in row 2, column 'y'"),
        ("a,b,y\n1,2,p\n\n1,red,q\n", r"'red' in row 2, column 'b'.*ignore"),
        ("a,b,y\n1,2,p\n,2,q\n", r"nothing in row 2, column 'a'"),
        ("a,b,y\n1,NA,p\n1,2,q\n", r"'NA' in row 1, column 'b'"),
        ("a,b,y\n1,nan,p\n1,2,q\n", r"'nan' in row 1, column 'b'"),
        ("a,b,y\n1,2,p\n1,inf,q\n", r"'inf' in row 2, column 'b'"),
        (f"a,b,y\n1,2,p\n1,1{'0' * 400},q\n", r"row 2, column 'b'"),
        (f"a,b,y\n1,2,p\n1,1{'0' * 35},q\n", r"up to 1e\+30, .* row 2, column 'b'"),
        ("a,b,y\n1,2,p\n1,2,\n", r"a target in every row, but got nothing in row 2, column 'y'"),
        ("a,b,y\n1,2,3.5\n1,2,n/a\n", "a target in every row, but got 'n/a'"),
        ("a,b,y\n1,2,3.5\n1,2,4\n1,2,low\n", r"`target` .*got 'low' in row 3.*task = \"classes\""),
        ("a,b,y\n1,2,x\n1,2,4\n1,2,low\n", r"`target` .*got '4' in row 2"),
        ("a,b,y\n1,2,p\n1,3,p\n", "different values, but got 'p' in every row"),
        ("a,b,y\n1,2,1.5\n1,3,1.5\n", "different values"),
        ("y\np\nq\n", "columns beside the target, but got .*'y'"),
        ("a,b,a,y\n1,2,3,p\n1,2,3,q\n", "2 called 'a'"),
        ("a,y,b,y\n1,p,3,p\n1,q,3,q\n", "2 called 'y'"),
        (",a,y\n0,2,p\n1,2,q\n", "named columns.*index=False"),
        ("a,b,yy\n1,2,p\n1,2,q\n", "`target` to be a column of .*: a, b, yy, but got 'y'. Did you mean 'yy'"),
        ("1,2,p\n1,2,q\n1,2,p\n", "`target` to be a column"),
        ("1,2,3\n1,2,4\n1,2,5\n", "`target` to be a column of .*: 1, 2, 3, .*first line"),
        ("a;b;y\n1;2;p\n1;2;q\n", "`target` to be a column of .*: a;b;y, .*commas"),
        (b"a,b,y\n1,2,\xe9\n1,2,p\n", "in UTF-8 "),
        ('a,b,y\n1,2,"p\n1,2,q\n', "to be CSV"),
        ("a,b,y\n1,2,p\n1,2,q\n", "none of '[pq]'. Add rows"),  # one row to train on, of one class
    ],
)
def test_a_table_that_cannot_be_used_is_refused(text: str | bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        data.read_table(table(tmp_path, text), "y").split(None, 0)
    assert re.fullmatch(FOUR_PARTS + ".*", str(caught.value), re.DOTALL)


def test_wrong_splits_and_changed_tables_are_refused(tmp_path: Path) -> None:
    path = table(tmp_path, lines(20, lambda i: "pq"[i % 2]))
    found = data.read_table(path, "y")
    for words, examples, valid in (("`examples`.*17", 17, 0), ("`valid`.*8", 8, 8)):
        with pytest.raises(ValueError, match=words):
            found.split(examples, valid)
    with pytest.raises(ValueError, match=r"`ignore`.*'b'"):
        data.read_table(path, "y", ignore=["bb"])
    with pytest.raises(ValueError, match=r"a finite number.* but got 'p' in row 1"):
        data.read_table(path, "y", task="numbers")
    assert data.read_table(path, "y", sha256=found.sha256).sha256 == found.sha256
    path.write_text(path.read_text() + "20,1,p\n")
    with pytest.raises(ValueError, match=r"t\.csv, which has changed"):
        data.read_table(path, "y", sha256=found.sha256)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"columns": 3}', '{"columns": ["a"], "centre": [1], "scale": [0]'])
def test_broken_units_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        data.Standardisation.from_json(text)
