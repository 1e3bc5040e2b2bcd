"""Which cases a suite has: mistakes of tiles are seen, right kernels are right, options are those that were named."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from attention_service.cli import main
from attention_service.conformance import read, run, write
from attention_service.conformance.changes import Fields
from attention_service.conformance.corners import CORNERS, LONG_TILES, TILE_CORNERS
from attention_service.conformance.gradient_corners import GRADIENT_CORNERS
from attention_service.conformance.requests import LONG_TYPES, NAMES, Choice, make_fields
from attention_service.conformance.runner import run_cases
from attention_service.conformance.suite import SuiteCase, finished, make_cases
from tests.helpers.by_decimal import Exact
from tests.helpers.right_kernels import Kernel, flash

DIMS: Final = (64, 128)
KNOWN: Final = ("is_causal", "key_lengths")
# So many cases have each corner of long cases once.
LONG_CORNERS: Final = (*TILE_CORNERS, *CORNERS, *GRADIENT_CORNERS)
COUNT: Final = 5 * -(-len(LONG_CORNERS) // 3)
MISTAKES: Final = ("not_rescaled", "output_not_rescaled", "tail_dropped", "tail_seen", "sum_of_last_tile", "last_tile")


def tiled(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    is_causal: bool = False,
    key_lengths: np.ndarray | None = None,
    tile: int = 64,
    mistake: str = "",
) -> np.ndarray:
    """Attention (b, h, q, e) by tiles of keys, in float32 as kernels compute it. mistake: of MISTAKES"""
    b, h, q, d = query.shape
    k = key.shape[2]
    padding = ((0, 0), (0, 0), (0, -k % tile), (0, 0))  # keys and values of 0 fill the last tile
    key, value = (
        np.pad(np.repeat(array, h // array.shape[1], axis=1).astype(np.float32), padding) for array in (key, value)
    )
    ends = np.full(b, k) if key_lengths is None else key_lengths
    most, total = np.full((b, h, q, 1), np.float32(-1e30)), np.zeros((b, h, q, 1), np.float32)
    output = np.zeros((b, h, q, value.shape[-1]), np.float32)
    for start in range(0, k // tile * tile if mistake == "tail_dropped" else k, tile):
        keys = np.arange(start, start + tile)
        scores = query.astype(np.float32) @ key[:, :, keys].swapaxes(-1, -2) / np.float32(np.sqrt(d))
        seen = np.broadcast_to((keys < ends[:, None])[:, None, None], scores.shape)
        if is_causal:
            seen = seen & (keys <= np.arange(q)[:, None])
        if mistake == "tail_seen":
            seen = seen | (keys >= k)
        new = np.maximum(most, np.where(seen, scores, -1e30).max(axis=-1, keepdims=True))
        weights = np.where(seen, np.exp(np.where(seen, scores - new, 0)), 0)
        change = np.exp(most - new)
        of_sum = 0 if mistake in ("sum_of_last_tile", "last_tile") else 1 if mistake == "not_rescaled" else change
        of_output = 0 if mistake == "last_tile" else 1 if mistake in ("not_rescaled", "output_not_rescaled") else change
        total = total * of_sum + weights.sum(axis=-1, keepdims=True)
        output = output * of_output + weights @ value[:, :, keys]
        most = new
    return (output / np.where(total == 0, 1, total)).astype(query.dtype)


@cache
def of_corner(name: str, dtypes: tuple[str, ...], dims: tuple[int, ...]) -> list[SuiteCase]:
    corner = next(corner for corner in (*TILE_CORNERS, *CORNERS) if corner.name == name)
    made: list[SuiteCase] = []
    for dtype in dtypes:
        for dim in dims:
            fields = make_fields(corner, dtype, np.random.default_rng(len(made)), dim)
            made.append(finished(f"{dtype}-{dim}", name, fields))
    return made


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("tile", LONG_TILES)
def test_mistakes_of_a_tile_are_wrong_in_its_corner(tile: int, mistake: str) -> None:
    cases = of_corner(f"tiles.{tile}", LONG_TYPES, DIMS[:1])
    result = run_cases(cases, partial(tiled, tile=tile, mistake=mistake), explain=False)
    assert [outcome.status for outcome in result.corners[0].outcomes] == ["wrong"] * 3


@pytest.mark.parametrize("tile", LONG_TILES)
def test_mistakes_of_a_tile_are_wrong_under_a_mask(tile: int) -> None:
    """In cases that mask by position, too; the tails of tiles are beyond lengths there."""
    for name in ("tiles.causal", "tiles.key_lengths"):
        cases = of_corner(name, ("bfloat16",), (128,))
        for mistake in ("not_rescaled", "output_not_rescaled", "sum_of_last_tile"):
            result = run_cases(cases, partial(tiled, tile=tile, mistake=mistake), explain=False)
            assert result.corners[0].status == "wrong", (name, mistake)


@pytest.fixture(scope="module")
def cases() -> list[SuiteCase]:
    """Long cases of a kernel with two options, of all types."""
    return list(make_cases(COUNT, 1, Choice.of(KNOWN, DIMS, ())))


@pytest.mark.slow
@pytest.mark.parametrize("tile", [16, 128, 512])
def test_the_right_kernel_is_right_in_all_cases(tile: int, cases: list[SuiteCase]) -> None:
    result = run_cases(cases, partial(tiled, tile=tile), explain=False)
    assert result.count("correct") == len(cases)
    assert {case.dtype for case in cases} == {*LONG_TYPES}
    assert {f"tiles.{tile}", "tiles.causal", "tiles.key_lengths", "combined"} <= {case.corner for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize("folds", ["nothing", "scale and log2(e)"])
def test_right_kernels_of_tensor_cores_are_right_in_all_cases(folds: str, cases: list[SuiteCase]) -> None:
    """With weights that are rounded before the product and before the sum, and exp2 by a polynomial."""
    kernel = Kernel(tile=128, folds=folds, rounds_weights=True, rounds_sum=True, cubic=True)

    def target(query: np.ndarray, key: np.ndarray, value: np.ndarray, is_causal: bool = False) -> Any:
        exact = query.dtype == np.float32
        return flash(query, key, value, Kernel(tile=128) if exact else kernel, is_causal=is_causal)

    result = run_cases(cases, target, explain=False)
    assert result.count("correct") == sum("key_lengths" not in case.options for case in cases)
    assert result.exit_status == 0


def test_long_answers_agree_with_fifty_digits() -> None:
    (case,) = of_corner("tiles.512", ("bfloat16",), (64,))
    exact = Exact(case.fields)
    row = exact.row(1, 2, 16)
    near = 16 * 2.0**-52 * (1 + row.reach)
    expected = case.expected["output"][1, 2, 16].tolist()
    assert [float(x) for x in row.output] == pytest.approx(expected, rel=0, abs=near * row.size)


def head_dim(fields: Fields) -> int:
    """Features of a head."""
    layout = fields.get("layout", "bhld")
    axis = layout.index("d")
    features = int(fields["query"].shape[axis if fields["query"].ndim == len(layout) else -1])
    return features // int(fields.get("num_heads", 1))


@pytest.mark.slow
def test_long_cases_have_the_dimensions_and_types_that_were_named() -> None:
    made = requests(2 * COUNT, 2, Choice.of(None, DIMS, ()))
    assert len(made) == 2 * COUNT
    assert {(head_dim(case.fields), case.dtype) for case in made} == {(d, t) for d in DIMS for t in LONG_TYPES}
    own = {"float64"}
    assert {case.corner for case in made} == {corner.name for corner in LONG_CORNERS} - own | {"combined"}
    assert max(case.fields["key"].size // case.fields["key"].shape[-1] for case in made) > 1000


@pytest.mark.parametrize("dtypes", [("bfloat16",), ("bfloat16", "float16"), LONG_TYPES])
@pytest.mark.parametrize("dims", [(64,), (64, 128), (64, 96, 128)])
def test_turns_have_all_pairs_of_types_and_dimensions(dtypes: tuple[str, ...], dims: tuple[int, ...]) -> None:
    choice = Choice.of(None, dims, dtypes)
    pairs = [choice.turn(CORNERS[0], turn) for turn in range(len(dtypes) * len(dims))]
    assert {*pairs} == {(dtype, dim) for dtype in dtypes for dim in dims}
    halves = next(corner for corner in CORNERS if corner.name == "float16.large")
    assert (halves in choice.corners) == ("float16" in dtypes)


def options_of(made: Iterable[SuiteCase]) -> set[str]:
    return {name for case in made for name in case.options}


def requests(count: int, seed: int, choice: Choice) -> list[SuiteCase]:
    """Cases without their answers, which take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        target = "attention_service.conformance.suite.finished"
        patch.setattr(target, lambda name, corner, fields: SuiteCase(name, corner, fields, {}, {}))
        return list(make_cases(count, seed, choice))


def test_the_names_are_those_that_cases_have() -> None:
    assert options_of(requests(1500, 0, Choice())) == {*NAMES}


@pytest.mark.slow
def test_only_cases_with_options_that_are_named() -> None:
    for only in ((), KNOWN, ("is_causal", "past_key", "past_value"), ("layout", "scale"), ("include", "sinks")):
        made = requests(600, 5, Choice.of(only, (), ()))
        assert options_of(made) == {*only}
        # All of `combined`, and the same single cases as without it.
        assert sum(case.corner == "combined" for case in made) == 240
        every = {case.name: case for case in requests(600, 5, Choice()) if {*case.options} <= {*only}}
        single = {case.name: case for case in made if case.corner != "combined"}
        assert single.keys() == {name for name, case in every.items() if case.corner != "combined"}
        for name, case in single.items():
            np.testing.assert_array_equal(case.fields["query"], every[name].fields["query"])


def test_pairs_of_options_are_judged() -> None:
    only = ("is_causal", "key_lengths", "softcap")
    made = [{*case.options} for case in requests(300, 0, Choice.of(only, (), ()))]
    for pair in ({"is_causal", "key_lengths"}, {"is_causal", "softcap"}, {"key_lengths", "softcap"}):
        assert sum(pair <= options for options in made) >= 5


def test_a_kernel_is_judged_by_its_own_options() -> None:
    result = run(None, tiled, only=KNOWN, dtypes=LONG_TYPES)
    assert (result.exit_status, result.count("unsupported")) == (0, 0)
    assert result.count("correct") > 120
    corners = {corner.name for corner in result.corners}
    assert {"plain", "grouped_heads", "causal", "key_lengths", "combined"} <= corners
    assert not {"causal.first", "mask", "logsumexp"} & corners
    assert {outcome.case.dtype for corner in result.corners for outcome in corner.outcomes} == {*LONG_TYPES}


def test_what_no_suite_has_is_refused(tmp_path: Path) -> None:
    for choice, said in (
        ({"only": ["is_causal", "causal"]}, "only: expected names of alibi_slopes, bias, "),
        ({"only": "mask"}, "only: expected names of .*, got a, k, m, s"),
        ({"head_dims": [64, 20]}, "head_dims: expected multiples of 8 up to 512, got 20"),
        ({"head_dims": [0]}, "got 0"),
        ({"dtypes": ["bf16"]}, "dtypes: expected names of float32, bfloat16, float64, float16, got bf16"),
    ):
        for function in (lambda **choice: run(None, tiled, **choice), partial(write, tmp_path)):
            with pytest.raises(ValueError, match=said):
                function(**choice)
    with pytest.raises(ValueError, match="head_dims: expected no directory"):
        run(tmp_path, tiled, head_dims=[64])


def test_a_suite_as_files_has_the_same_choice(tmp_path: Path) -> None:
    count = write(tmp_path, 25, 0, only=["is_causal"], head_dims=[64], dtypes=["bfloat16", "float32"])
    made = list(read(tmp_path))
    assert 10 < count == len(made)
    assert {head_dim(case.fields) for case in made} == {64}
    assert {case.dtype for case in made} == {"bfloat16", "float32"}
    assert options_of(made) == {"is_causal"}
    result = run(tmp_path, tiled, only=[], dtypes=["float32"])
    own = [case for case in made if case.dtype == "float32" and not case.options]
    assert result.count("correct") == sum(len(corner.outcomes) for corner in result.corners) == len(own) > 0


def test_the_commands_have_the_same_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "cases")
    choice = ["--only", *KNOWN, "--head-dims", "64", "--dtypes", "bfloat16"]
    assert main(["conformance", "write", folder, "--cases", "10", *choice]) == 0
    assert options_of(read(folder)) <= {*KNOWN}
    assert {case.dtype for case in read(folder)} == {"bfloat16"}
    target = f"{__name__}:tiled"
    capsys.readouterr()
    assert main(["conformance", "run", target, "--dir", folder, "--only"]) == 0
    assert "unsupported" in capsys.readouterr().out
    assert main(["conformance", "run", target, "--only", "causal"]) == 3
    assert "only: expected names of alibi_slopes, " in capsys.readouterr().err
    assert main(["conformance", "write", folder, "--head-dims", "65"]) == 1
    assert capsys.readouterr().err == "head_dims: expected multiples of 8 up to 512, got 65\n"
    assert main(["conformance", "run", target, "--dir", folder, "--dtypes", "float64", "--format", "github"]) == 2
    assert "there is nothing to judge" in capsys.readouterr().out
