"""SOURCES: where data sets are published, and the checksums of their files."""

from collections.abc import Mapping
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import NamedTuple


class Source(NamedTuple):
    """A published set.

    Attributes:
        url: Folder of the files.
        files: md5 of each file as published.
        members: If the file is an archive: path, bytes and, where known, md5 of each file that is taken out of it.
    """

    url: str
    files: Mapping[str, str]
    members: Mapping[str, tuple[int, str | None]] = MappingProxyType({})

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the files in the set's folder."""
        return tuple(PurePosixPath(path).name for path in self.members or self.files)


SOURCES = {
    "mnist": Source(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": Source(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "cifar-10": Source(
        "https://www.cs.toronto.edu/~kriz",
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        {
            "cifar-10-batches-bin/data_batch_1.bin": (30_730_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
            "cifar-10-batches-bin/data_batch_2.bin": (30_730_000, "5ea93a67294ea407fff1d09f752e9692"),
            "cifar-10-batches-bin/data_batch_3.bin": (30_730_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
            "cifar-10-batches-bin/data_batch_4.bin": (30_730_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
            "cifar-10-batches-bin/data_batch_5.bin": (30_730_000, "53f37980c15c3d472c316c40844f3f0d"),
            "cifar-10-batches-bin/test_batch.bin": (30_730_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
        },
    ),
    "cifar-100": Source(
        "https://www.cs.toronto.edu/~kriz",
        {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
        {"cifar-100-binary/train.bin": (153_700_000, None), "cifar-100-binary/test.bin": (30_740_000, None)},
    ),
}
