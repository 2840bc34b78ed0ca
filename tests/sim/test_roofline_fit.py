"""The roofline's efficiencies against measured tables: fitted on the smallest three quarters of
each, judged on the largest quarter, which the fit did not see."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvasir_core.errors import ScenarioError
from kvasir_sim import fit_tables
from kvasir_sim.costs.efficiency import FITTED, FITTED_DEVICE
from kvasir_sim.costs.roofline import DeviceCosts
from kvasir_sim.costs.routing import zipf_shares
from kvasir_sim.devices import CATALOGUE
from kvasir_sim.fit import Model, Residual, Table, judge, least_squares, main, residual_table, solve
from tests.sim.cost_inputs import data_file

UNSEEN_MAX = {"matrix": 0.15, "experts": 0.15, "attention": 0.30}


@cache
def tables() -> dict[str, Table]:
    folder = data_file("traces", "measured_vllm").parent
    return {table.name: table for table in fit_tables.all_tables(folder)}


@cache
def residuals() -> dict[str, Residual]:
    return {name: judge(table) for name, table in tables().items()}


def deployed() -> DeviceCosts:
    shape = fit_tables.SHAPE
    return DeviceCosts(shape, CATALOGUE[FITTED_DEVICE], FITTED, zipf_shares(shape.experts, 0))


def largest_quarter(table: Table) -> list[int]:
    order = np.argsort(table.size, kind="stable")
    chosen: list[int] = order[int(len(order) * 0.75) :].tolist()
    return chosen


@pytest.mark.parametrize(
    "name", ["qkv_proj", "o_proj", "lm_head", "experts of one layer", "attention"]
)
def test_the_fit_predicts_the_largest_quarter_that_it_did_not_see(name: str) -> None:
    residual = residuals()[name]
    assert residual.unseen <= UNSEEN_MAX[residual.group]
    assert residual.unseen <= residual.unseen_p90 <= 0.5


def test_every_table_is_reported_with_what_rules_it() -> None:
    report = residual_table(list(residuals().values()))
    for name, residual in residuals().items():
        assert f"| {name} | {residual.points} |" in report
        assert sum(share for _, share in residual.bounds) == pytest.approx(1)


def test_arithmetic_names_the_limit_of_each_table() -> None:
    """Many rows of a matrix are compute-bound; experts, few of whom share a row, memory-bound."""
    rules = {name: max(r.bounds, key=lambda bound: bound[1])[0] for name, r in residuals().items()}
    assert rules["qkv_proj"] == rules["o_proj"] == "compute"
    assert rules["lm_head"] == rules["experts of one layer"] == "memory"


def test_no_fitted_memory_efficiency_of_uncached_weights_is_above_one() -> None:
    for name in ("lm_head", "experts of one layer"):
        assert residuals()[name].value("1/memory") > 1
    assert residuals()["qkv_proj"].value("1/memory") < 0.5  # The cache held these: not used.


def test_the_constants_in_the_code_are_those_of_the_fit() -> None:
    again = fit_tables.efficiency_from(list(residuals().values()))
    for name in FITTED.__dataclass_fields__:
        assert getattr(FITTED, name) == pytest.approx(getattr(again, name), rel=0.02), name


def test_the_cost_model_itself_predicts_the_largest_quarter_of_the_matrices() -> None:
    costs = deployed()
    for name, (inputs, outputs) in fit_tables.MATRICES.items():
        table = tables()[name]
        errors = [
            costs.matrix(int(table.size[k]), inputs, outputs).seconds / table.measured_s[k] - 1
            for k in largest_quarter(table)
        ]
        assert np.median(np.abs(errors)) <= 0.15, name


def test_the_cost_model_itself_predicts_the_largest_quarter_of_the_experts() -> None:
    table = tables()["experts of one layer"]
    costs = deployed()
    errors = []
    for k in largest_quarter(table):
        rows, distinct = divmod(int(table.size[k]), fit_tables.SHAPE.experts + 1)
        errors.append(costs.experts(rows, distinct).seconds / table.measured_s[k] - 1)
    assert np.median(np.abs(errors)) <= 0.15


def test_the_cost_model_itself_predicts_the_largest_quarter_of_attention() -> None:
    table = tables()["attention"]
    path = data_file("traces", "measured_vllm", f"{fit_tables.PREFIX}attention.csv")
    columns = fit_tables.read_columns(
        path, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    )
    attention = deployed().attention
    fitted_s = table.model.seconds(
        np.array([value for _, value in residuals()["attention"].constants])
    )
    errors, apart = [], []
    for k in largest_quarter(table)[::7]:
        chunk, start, decodes, context = (int(column[k]) for column in columns)
        chunks = ((start,), (chunk,)) if chunk else ((), ())
        seconds = attention.seconds(decodes, decodes * context, *chunks)
        errors.append(seconds / table.measured_s[k] - 1)
        apart.append(seconds / fitted_s[k] - 1)
    assert np.median(np.abs(errors)) <= 0.30
    assert np.max(np.abs(apart)) <= 0.02  # The scalar and the fitted formula are one formula.


def test_a_kinked_line_is_found_again_from_a_poor_guess() -> None:
    size = np.linspace(1.0, 100.0, 60)
    model = Model(((0, np.ones(60)),), (("a", ((1, np.full(60, 10.0)),)), ("b", ((2, size),))))
    truth = np.array([3.0, 2.0, 0.7])
    found = solve(model, model.seconds(truth), (1.0, 1.0, 1.0))
    assert found[1] * 10 + found[0] == pytest.approx(23)  # The sum is all that the flat part tells.
    assert model.seconds(found) == pytest.approx(model.seconds(truth))


def test_constants_never_become_negative() -> None:
    design = np.array([[1.0, 2.0], [1.0, 3.0], [1.0, 4.0]]) / np.array([[1.0], [2.0], [3.0]])
    found = least_squares(design, np.array([9.0, 9.0]))  # The best line starts below zero.
    assert found[0] == 0
    assert found[1] > 0


def test_a_constant_that_no_point_determines_keeps_its_guess() -> None:
    found = least_squares(np.array([[0.0, 2.0], [0.0, 2.0]]), np.array([7.0, 1.0]))
    assert found[0] == 7.0
    assert found[1] == pytest.approx(0.5)


def test_the_command_prints_the_table_and_the_constants(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(data_file("traces", "links").parent)]) == 0
    out = capsys.readouterr().out
    assert "| attention | 19364 |" in out
    assert "  matrix_flops = 0.62" in out


def test_a_directory_without_tables_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "cannot read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("size,other\n1,2\n", r"t\.csv: no column time"),
        ("size,time\n1,fast\n", r"t\.csv:2: time is 'fast'"),
        ("size,time\n1,2\n3,-4\n", r"t\.csv:3: time is '-4'"),
        ("size,time\n1,nan\n", r"t\.csv:2: time is 'nan'"),
        ("size,time\n1\n", r"t\.csv:2: time is ''"),
    ],
)
def test_a_table_with_a_wrong_value_names_its_line(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=what):
        fit_tables.read_columns(path, ("size", "time"))
