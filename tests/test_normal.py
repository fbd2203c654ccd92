import ast
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from ibnn.generators import generators_restored, seed_generators
from ibnn.normal import Space, _mixed, address, next_words, normals, normals_of, words
from ibnn.training.loop import FORWARD, LOADING

ROWS, NODES = 2000, 1500
GOLDEN_WORD = 973211550
GOLDEN_SEED = 2784611358  # of (0, 5)
HOME = Path(__file__).parent.parent
GOLDEN_NORMALS = [-1.170042, 1.52383, -0.637956]


@pytest.fixture(scope="module", params=[0, 1, 2**40 + 5], ids=["seed0", "seed1", "big"])
def sample(request: pytest.FixtureRequest) -> torch.Tensor:
    return normals(address(request.param, torch.arange(ROWS)), NODES).double()


def test_moments_are_those_of_a_standard_normal(sample: torch.Tensor) -> None:
    n = sample.numel()
    # standard errors of the sample moments of N(0, 1): var x = 1, var x² = 2, var x³ = 15, var x⁴ = 96
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(sample.pow(power).mean() - expected) < 4 * math.sqrt(variance / n)


def test_distribution_passes_kolmogorov_smirnov(sample: torch.Tensor) -> None:
    assert stats.kstest(sample.flatten()[::3].numpy(), "norm").pvalue > 1e-4


def test_rows_and_columns_are_uncorrelated(sample: torch.Tensor) -> None:
    # The extreme singular values of a matrix of independent normals lie at √R ± √D; any dependence pushes them out.
    singular = torch.linalg.svdvals(sample)
    assert singular[0] == pytest.approx(math.sqrt(ROWS) + math.sqrt(NODES), rel=0.01)
    assert singular[-1] == pytest.approx(math.sqrt(ROWS) - math.sqrt(NODES), rel=0.05)


def test_neighbouring_addresses_share_nothing() -> None:
    a = normals(address(0, 0, torch.arange(500)), 400)
    for other in (
        address(1, 0, torch.arange(500)),
        address(0, 1, torch.arange(500)),
        address(0, 0, torch.arange(1, 501)),
    ):
        correlation = (a * normals(other, 400)).mean()
        assert abs(correlation) < 4 / math.sqrt(a.numel())


def test_a_row_depends_on_its_own_address_alone() -> None:
    rows = normals(address(3, torch.arange(100)), 7)
    shuffled = torch.randperm(100)
    assert torch.equal(normals(address(3, shuffled), 7), rows[shuffled])


def test_numbers_stay_what_they_are() -> None:
    # Saved models name draws by address, so these values may never change.
    assert words(address(0, 1, 2)).item() == GOLDEN_WORD
    assert normals(address(7, 3), 3).flatten().tolist() == pytest.approx(GOLDEN_NORMALS, rel=1e-5)


@pytest.mark.parametrize("nodes", [1, 2, 7, 207, 1030])
def test_32_bit_arithmetic_gives_the_bits_of_64(nodes: int) -> None:
    at = address(2**40 + 5, Space.TRAIN, torch.arange(50) + 2**33, 1)
    half = (nodes + 1) // 2
    columns = _mixed(torch.arange(2 * half) + 0x5BD1E995)
    bits = _mixed(words(at)[:, None] ^ columns).float()
    radius = ((bits[:, :half] + 0.5) * 2.0**-32).log().mul(-2.0).sqrt()
    angle = bits[:, half:] * (2 * math.pi * 2.0**-32)
    expected = torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :nodes]
    assert torch.equal(normals(at, nodes), expected)


@pytest.mark.parametrize("first", [0, 8190, 3 * 8192])
def test_words_from_blocks_are_those_of_the_addresses(first: int) -> None:
    seed, past = torch.tensor(5), torch.tensor(first)
    expected = words(address(5, Space.ASSIGN, first + torch.arange(9000)))
    for _ in range(2):  # made, kept
        assert torch.equal(next_words(seed, past, Space.ASSIGN, 0, 9000), expected)
    with torch.inference_mode():
        next_words(past, past, Space.ASSIGN, 0, 3)
    assert not next_words(past, past, Space.ASSIGN, 0, 3).is_inference()


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    normals(address(0, torch.arange(5)), 5)
    assert torch.equal(before, torch.get_rng_state())


def test_the_operator_is_sound_and_graphs_draw_the_same_words() -> None:
    at = words(address(0, torch.arange(3)))
    torch.library.opcheck(torch.ops.ibnn.normals.default, (at, 5))
    assert torch.equal(torch.ops.ibnn.normals(at, 5), normals_of(at, 5))
    past = torch.tensor(9)
    traced = torch.compile(next_words, fullgraph=True, backend="aot_eager")
    copies = address(9, Space.TRAIN, torch.arange(10, 15), torch.arange(2)[:, None])
    assert torch.equal(next_words(past, past, Space.TRAIN, 1, 5, 2), words(copies))
    assert torch.equal(traced(past, past, Space.TRAIN, 1, 5, 2), words(copies))


# --------------------------------------------------------------------------------------------------------------- spaces


def test_spaces_are_distinct() -> None:
    assert len({member.value for member in Space}) == len(Space.__members__)
    drawn = {int(words(address(0, space, 1))) for space in Space}
    assert len(drawn) == len(Space)


def test_numbers_that_weights_and_predictions_depend_on() -> None:
    assert [space.name for space in sorted(Space) if space < 7] == [
        *("INIT_MEAN", "INIT_STD", "TRAIN", "ASSIGN", "PREDICT", "KL", "TIES")
    ]
    assert (Space.SEARCH, LOADING, FORWARD) == (101, 1, 2)


def calls(name: str) -> list[tuple[str, ast.Call]]:
    """Every call of a function of `normal` outside of its module, with the file."""
    paths = [p for room in ("src", "experiments", "benchmarks", "examples") for p in (HOME / room).rglob("*.py")]
    return [
        (path.name, node)
        for path in paths
        if path != HOME / "src/ibnn/normal.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and name in (getattr(node.func, "id", None), getattr(node.func, "attr", None))
    ]


def test_every_address_names_a_registered_space() -> None:
    spaces = {ast.unparse(call.args[1]): file for file, call in calls("address")}
    spaces |= {ast.unparse(call.args[2]): file for file, call in calls("next_words")}
    assert set(spaces) == {f"Space.{name}" for name in Space.__members__}, spaces  # each is used, and no other
    for function in ("normals", "words"):
        made = [(file, ast.unparse(call.args[0])) for file, call in calls(function)]
        assert all(at.startswith("address(") or at in ("key", "at") for _, at in made), made


def test_generators_are_seeded_by_names_alone() -> None:
    parts = [(file, part) for file, call in calls("seed_generators") for part in call.args]
    assert parts
    assert not [(file, ast.unparse(part)) for file, part in parts if isinstance(part, ast.Constant)]


# ----------------------------------------------------------------------------------------------------------- generators


def drawn() -> list[float]:
    return [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002  its global generator


def test_one_address_seeds_all_generators() -> None:
    with generators_restored():
        seed_generators(3, 1)
        first = drawn()
        seed_generators(3, LOADING)
        assert drawn() == first
        seed_generators(3, 2)
        assert all(a != b for a, b in zip(first, drawn(), strict=True))
        seed_generators(0, 5)
        assert torch.initial_seed() == GOLDEN_SEED  # decides the start of networks: it may never change


@pytest.mark.parametrize("fails", [False, True])
def test_generators_are_restored_even_after_an_error(fails: bool) -> None:
    seed_generators(1)
    expected = drawn()
    seed_generators(1)
    try:
        with generators_restored():
            seed_generators(2)
            drawn()
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert drawn() == expected
