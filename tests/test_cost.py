"""Costs: interpolation keeps order, corrections follow the machine and shrug at outliers, files are ours or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd.errors import ConfigError, PredictorError
from hvd.payoff import cost as cost_module
from hvd.payoff.cost import CostModel, Surface, hardware_fingerprint

WIDTHS = (2, 4, 8, 16, 32)
CONTEXTS = (32, 512, 4096)
SECONDS = np.array([[14, 18, 24, 40, 80], [16, 20, 26, 43, 84], [43, 55, 75, 109, 180]]) / 1e3


def model(*, shared: bool = False, min_width: int = 2, head: bool = True) -> CostModel:
    eagle3 = Surface((1, 2, 4, 8), (0, 2048), np.array([[2, 4, 8, 16], [3, 6, 12, 24]]) / 1e3)
    return CostModel(
        Surface(WIDTHS, CONTEXTS, SECONDS),
        eagle3=eagle3 if head else None,
        backlog_seconds=1e-4,
        overhead=1e-3,
        min_width=min_width,
        shared_passes=shared,
        hardware="h",
        model="m",
    )


def grids() -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, 300), min_size=1, max_size=6, unique=True).map(lambda g: tuple(sorted(g)))


@settings(max_examples=80, deadline=None)
@given(grids(), grids(), st.data())
def test_more_never_costs_less(sizes: tuple[int, ...], contexts: tuple[int, ...], data: st.DataObject) -> None:
    count = len(sizes) * len(contexts)
    values = data.draw(st.lists(st.floats(1e-4, 1.0), min_size=count, max_size=count))
    surface = Surface(sizes, contexts, np.array(values).reshape(len(contexts), len(sizes)))
    cost = CostModel(surface, min_width=data.draw(st.integers(1, 3)))
    for width, context, seconds in data.draw(
        st.lists(st.tuples(st.integers(1, 400), st.integers(0, 500), st.floats(1e-5, 10.0)), max_size=5)
    ):
        cost.observe_verify([width], [context], seconds)
    curves = np.array([cost.verify_curve(350, c) for c in (0, 1, 50, 299, 1000, 20000)])
    assert np.isfinite(curves).all()
    assert (curves > 0).all()
    assert (np.diff(curves, axis=1) >= 0).all()
    assert (np.diff(curves, axis=0) >= -1e-12).all()


def test_grid_points_and_the_space_between_them() -> None:
    cost = model()
    for i, context in enumerate(CONTEXTS):
        for j, width in enumerate(WIDTHS):
            assert cost.verify(width, context) == pytest.approx(SECONDS[i, j])
    assert cost.verify(3, 32) == pytest.approx(0.016)
    assert cost.verify(12, 272) == pytest.approx((0.032 + 0.0345) / 2)
    assert cost.verify(48, 32) == pytest.approx(0.120)  # goes on with the last slope
    assert cost.verify(2, 0) == pytest.approx(0.014)
    assert cost.verify(2, 8192) == pytest.approx(0.043 + 4096 * (0.043 - 0.016) / 3584)


def test_a_pass_narrower_than_the_backend_can_costs_the_same() -> None:
    cost = model(min_width=2)
    assert cost.verify(1, 32) == cost.verify(2, 32) < cost.verify(3, 32)
    wide = model(min_width=8)
    assert len({wide.verify(w, 32) for w in range(1, 9)}) == 1


def test_noise_in_the_measurements_is_levelled_out() -> None:
    cost = CostModel(Surface((1, 2, 4), (0,), np.array([[3.0, 2.0, 4.0]])))
    assert cost.verify(2, 0) == 3.0


def test_batches() -> None:
    apart, together = model(shared=False), model(shared=True)
    widths, contexts = [2, 8, 5], [100, 700, 3000]
    alone = sum(apart.verify(w, c) for w, c in zip(widths, contexts, strict=True))
    assert apart.verify_batch(widths, contexts) == pytest.approx(alone)
    assert together.verify_batch(widths, contexts) < alone
    assert together.verify_batch([4, 4], [32, 32]) == pytest.approx(together.verify(8, 32))
    assert together.verify_batch([9], [900]) == pytest.approx(together.verify(9, 900))
    curve = together.batch_curve(40, [32, 32])
    assert curve[7] == pytest.approx(together.verify(8, 32))
    assert (np.diff(curve) >= 0).all()


def test_head_costs() -> None:
    cost = model()
    assert cost.eagle3(0, 5, 100) == 0.0
    assert cost.eagle3(4, 1, 0) == pytest.approx(0.008)
    assert cost.eagle3(4, 11, 0) == pytest.approx(0.009)
    assert cost.eagle3(4, 1, 1024) == pytest.approx(0.010)
    guess = model(head=False)
    assert guess.eagle3(4, 1, 0) == pytest.approx(0.014)
    for _ in range(50):
        guess.observe_eagle3(4, 1, 0, 0.028)
    assert guess.eagle3(4, 1, 0) == pytest.approx(0.028, rel=0.05)


# -- corrections -------------------------------------------------------------------------------------------------------


def ratios(cost: CostModel) -> np.ndarray:
    curve = cost.verify_curve(32, 512)
    return curve / curve[1]


def test_one_outlier_moves_next_to_nothing() -> None:
    cost, before = model(), ratios(model())
    cost.observe_verify([16], [512], 30.0)
    assert np.abs(ratios(cost) / before - 1).max() < 0.01
    assert cost.verify(16, 512) < 0.043 * 1.06


def test_a_busy_machine_slows_all_widths_alike() -> None:
    cost, before = model(), ratios(model())
    for _ in range(60):
        cost.observe_verify([2], [512], 0.016 * 3)
    assert cost.verify(2, 512) == pytest.approx(0.048, rel=0.03)
    assert cost.verify(32, 512) == pytest.approx(0.084 * 3, rel=0.25)
    assert np.abs(ratios(cost) / before - 1).max() < 0.25
    assert cost.eagle3(1, 1, 0) == pytest.approx(0.006, rel=0.25)


def test_a_width_that_is_dearer_than_profiled_is_found_out() -> None:
    cost = model()
    for _ in range(150):
        cost.observe_verify([2], [512], 0.016)
        cost.observe_verify([16], [512], 0.086)
    assert cost.verify(16, 512) / cost.verify(2, 512) == pytest.approx(0.086 / 0.016, rel=0.1)


def test_nonsense_measurements_are_passed_over() -> None:
    cost, before = model(), ratios(model())
    for seconds in (0.0, -1.0, float("nan")):
        cost.observe_verify([2], [10], seconds)
        cost.observe_eagle3(2, 1, 10, seconds)
    cost.observe_verify([], [], 1.0)
    assert (ratios(cost) == before).all()


def test_overhead_follows_but_not_an_outlier() -> None:
    cost = model()
    cost.observe_overhead(5.0)
    assert cost.overhead < 1.3e-3
    for _ in range(200):
        cost.observe_overhead(2e-3)
    assert cost.overhead == pytest.approx(2e-3, rel=0.05)


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    for cost in (model(), model(head=False, shared=True)):
        path = tmp_path / "deep" / "cost.json"
        cost.save(path)
        found = CostModel.load(path, model="m", hardware="h")
        assert (found.verify_curve(50, 700) == cost.verify_curve(50, 700)).all()
        assert found.eagle3(3, 4, 99) == cost.eagle3(3, 4, 99)
        assert (found.overhead, found.min_width, found.shared_passes) == (1e-3, 2, cost.shared_passes)
        assert [p.name for p in path.parent.iterdir()] == ["cost.json"]


def test_corrections_are_not_saved(tmp_path: Path) -> None:
    cost = model()
    for _ in range(30):
        cost.observe_verify([2], [512], 1.0)
    cost.save(tmp_path / "c.json")
    assert CostModel.load(tmp_path / "c.json").verify(2, 512) == pytest.approx(0.016)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "x"}, "not a cost file"),
        ({"version": 7}, "version 7"),
        ({"verify": None}, "incomplete"),
        ({"verify": {"sizes": [1], "contexts": [0], "seconds": [[-1.0]]}}, "positive"),
        ({"verify": {"sizes": [2, 1], "contexts": [0], "seconds": [[1.0, 1.0]]}}, "ascend"),
        ({"verify": {"sizes": [1], "contexts": [0], "seconds": [[1.0, 1.0]]}}, "must be"),
        ({"verify": {"sizes": [1], "contexts": [0], "seconds": [[float("nan")]]}}, "finite"),
        *(({"min_width": value}, "incomplete") for value in (None, 0, -3, 1.5, float("inf"), 10**400, "x")),
        *(
            ({key: value}, "incomplete")
            for key in ("overhead", "backlog_seconds")
            for value in (-1, float("nan"), None)
        ),
    ],
)
def test_foreign_files_are_refused_and_left_alone(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "cost.json"
    model().save(path)
    changed = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(changed | {"checksum": cost_module._checksum(changed)}))
    content = path.read_bytes()
    with pytest.raises(PredictorError, match=message):
        CostModel.load(path)
    assert path.read_bytes() == content


def test_no_flipped_bit_changes_what_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    cost = model()
    cost.save(path)
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        try:
            found = CostModel.load(path)
        except PredictorError:
            continue
        assert json.loads(path.read_bytes()) == json.loads(content)  # 1e-5 and 1E-5
        assert (found.verify_curve(50, 700) == cost.verify_curve(50, 700)).all()
    edited = json.loads(content) | {"overhead": 0.5}
    path.write_text(json.dumps(edited))
    with pytest.raises(PredictorError, match="checksum"):
        CostModel.load(path)


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text("[" * 100_000)
    with pytest.raises(PredictorError, match="torn"):
        CostModel.load(tmp_path / "cost.json")


def test_torn_missing_and_other_machines_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    model().save(path)
    for fingerprints in ({"model": "x"}, {"hardware": "x"}):
        with pytest.raises(PredictorError, match="another"):
            CostModel.load(path, **fingerprints)
    content = path.read_bytes()
    cuts: Sequence[int] = (0, 1, len(content) // 2, len(content) - 1)
    for cut in cuts:
        path.write_bytes(content[:cut])
        with pytest.raises(PredictorError, match="torn"):
            CostModel.load(path)
    path.write_bytes(b"\xff\xfe[]")
    with pytest.raises(PredictorError, match="torn"):
        CostModel.load(path)
    path.write_text("[]")
    with pytest.raises(PredictorError, match="not a cost file"):
        CostModel.load(path)
    with pytest.raises(PredictorError, match="can't be read"):
        CostModel.load(tmp_path / "none.json")


def test_the_hardware_has_a_stable_fingerprint() -> None:
    assert hardware_fingerprint() == hardware_fingerprint()
    assert len(hardware_fingerprint()) == 16


def test_a_file_that_cant_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"can't write the cost file .*cost\.json"):
        model().save(tmp_path / "file" / "cost.json")
