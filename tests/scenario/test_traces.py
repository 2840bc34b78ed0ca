"""Trace files: formats, units and clocks; rows in odd orders and shapes."""

from pathlib import Path

import numpy as np
import pytest

from kvasir_core.errors import ScenarioError
from kvasir_scenario import trace_columns, traces
from kvasir_scenario.traces import PrefixHashes, Trace, TraceFormat, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def read(
    tmp_path: Path,
    kind: TraceFormat,
    text: str | bytes,
    *,
    time_unit: str | None = None,
    columns: dict[str, str] | None = None,
) -> Trace:
    path = tmp_path / "trace.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path, kind, time_unit=time_unit, columns=columns)


def offsets_ns(trace: Trace) -> list[int]:
    return list(trace.times.arrival_ns().tolist())


def test_azure_times_keep_their_seven_digits(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951691,396,109\r\n"
    trace = read(tmp_path, "azure", AZURE + rows)
    assert offsets_ns(trace) == [0, 4_314_579_100]
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01.009931+00:00"),
        ("2024-05-10T00:00:00.009930Z", "2024-05-10T00:00:01.009931Z"),
        ("2024-05-10 00:00:00.009930", "2024-05-10 02:00:01.009931+02:00"),
        ("2024-05-10 00:00:00.009930000", "2024-05-10 00:00:01.009931"),
    ],
)
def test_date_times_may_carry_a_zone(tmp_path: Path, first: str, second: str) -> None:
    trace = read(tmp_path, "azure", f"{AZURE}{first},1,1\n{second},1,1\n")
    assert offsets_ns(trace) == [0, 1_000_001_000]


def test_both_versions_of_burstgpt_read_the_same(tmp_path: Path) -> None:
    later = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    first = read(tmp_path, "burstgpt", BURST + "5,GPT-4,100,10,110,API log\n35.5,x,7,0,7,API log\n")
    second = read(
        tmp_path,
        "burstgpt",
        later + "5,s1,9.5,GPT-4,100,10,110,API log\n35.5,s2,1,x,7,0,7,API log\n",
    )
    for trace in (first, second):
        assert offsets_ns(trace) == [0, 30_500_000_000]
        assert trace.prompt_tokens.tolist() == [100, 7]
        assert trace.output_tokens.tolist() == [10, 0]


def test_mooncake_hashes_follow_their_requests(tmp_path: Path) -> None:
    rows = (
        '{"timestamp": 3, "input_length": 9, "output_length": 2, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 1, "input_length": 5, "output_length": 1}\n\n'
        '{"timestamp": 2.5, "input_length": 6, "output_length": 3, "hash_ids": [7]}'
    )
    trace = read(tmp_path, "mooncake", rows)
    assert offsets_ns(trace) == [2_000_000, 0, 1_500_000]
    hashes = trace.prefix_hashes
    assert hashes is not None
    assert [hashes.of(row) for row in range(3)] == [(7, 8, 9), (), (7,)]
    taken = hashes.take(np.array([2, 0, 1, 2]))
    assert [taken.of(row) for row in range(4)] == [(7,), (7, 8, 9), (), (7,)]


def test_no_hashes_at_all_can_be_taken() -> None:
    none = PrefixHashes(np.array([], dtype=np.int64), np.array([0, 0, 0]))
    assert none.take(np.array([1, 0])).of(1) == ()


@pytest.mark.parametrize(
    ("unit", "values"),
    [
        ("s", ("100", "100.5", "101")),
        ("ms", ("41000", "41500", "42000")),
        ("us", ("1787000000000000", "1787000000500000", "1787000001000000")),
        ("ns", ("1787000000000000000", "1787000000500000000", "1787000001000000000")),
        ("s", ("1787000000.000000000", "1787000000.500000000", "1787000001")),
        ("us", ("1.787e15", "1787000000500000.000", "1787000001000000")),
    ],
)
def test_units_and_epochs_give_the_same_offsets(
    tmp_path: Path, unit: str, values: tuple[str, ...]
) -> None:
    text = "arrival,prompt,output\n" + "".join(f"{value},1,1\n" for value in values)
    assert offsets_ns(read(tmp_path, "csv", text, time_unit=unit)) == [0, 500_000_000, 10**9]


def test_epochs_keep_every_nanosecond_whatever_their_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk of whole seconds, one of small decimals, one that no double can hold."""
    monkeypatch.setattr(traces, "CHUNK_ROWS", 1)
    text = "arrival_s,prompt,output\n3,1,1\n4.25,1,1\n1787000003.000000001,1,1\n"
    assert offsets_ns(read(tmp_path, "csv", text)) == [0, 1_250_000_000, 1787000000000000001]


def test_decimal_seconds_are_rounded_once_from_the_double(tmp_path: Path) -> None:
    values = [0.0, 5.8926549999999995, 4.541877, 1.0000000005, 0.1 + 0.2]
    text = "arrival_s,prompt,output\n" + "".join(f"{value!r},1,1\n" for value in values)
    trace = read(tmp_path, "csv", text)
    for scale in (1.0, 0.2, 0.37):
        expected = [round(value * scale * 1e9) for value in values]
        assert trace.times.arrival_ns(scale).tolist() == expected


@pytest.mark.parametrize(
    ("column", "unit_ns"),
    [("arrival_s", 10**9), ("arrival_ms", 10**6), ("arrival_us", 1000), ("arrival_ns", 1)],
)
def test_a_column_name_may_declare_the_unit(tmp_path: Path, column: str, unit_ns: int) -> None:
    trace = read(tmp_path, "csv", f"{column},prompt_tokens,output_tokens\n0,1,1\n3,1,1\n")
    assert offsets_ns(trace) == [0, 3 * unit_ns]
    assert trace.warnings == ()


def test_a_plain_csv_may_hold_date_times(tmp_path: Path) -> None:
    text = "when,prompt,output\n2024-01-01 00:00:00,1,1\n2024-01-01 00:00:01.5,1,1\n"
    trace = read(tmp_path, "csv", text, columns={"arrival": "when"})
    assert offsets_ns(trace) == [0, 1_500_000_000]


def test_an_undeclared_unit_is_taken_as_seconds_with_a_warning(tmp_path: Path) -> None:
    trace = read(tmp_path, "csv", "arrival,prompt,output\n0,1,1\n0.5,1,1\n1.0,1,1\n")
    assert offsets_ns(trace) == [0, 500_000_000, 10**9]
    (warning,) = trace.warnings
    assert "'arrival'" in warning
    assert "time_unit" in warning
    assert read(tmp_path, "csv", "arrival,prompt,output\n0,1,1\n", time_unit="s").warnings == ()


@pytest.mark.parametrize(
    "values",
    [
        ("1787000000000000", "1787000000500000", "1787000001000000"),
        ("1787000000000.5", "1787000000500.5"),
        ("1787000000000000.5", "1787000000000001.5"),
        ("0", "500000", "1000000"),
    ],
)
def test_an_undeclared_unit_that_cannot_be_seconds_is_refused(
    tmp_path: Path, values: tuple[str, ...]
) -> None:
    text = "arrival,prompt,output\n" + "".join(f"{value},1,1\n" for value in values)
    with pytest.raises(ScenarioError, match=r"'arrival'.*workload\.time_unit"):
        read(tmp_path, "csv", text)


def test_date_times_refuse_a_declared_unit(tmp_path: Path) -> None:
    with pytest.raises(
        ScenarioError, match=r"txt:2: column 'TIMESTAMP'.*remove workload.time_unit"
    ):
        read(tmp_path, "azure", AZURE + "2023-11-16 18:15:46,1,1\n", time_unit="ms")


def test_bom_quotes_blank_lines_and_spaces_change_nothing(tmp_path: Path) -> None:
    plain = read(
        tmp_path, "azure", AZURE + "2023-11-16 18:15:46.5,10,2\n2023-11-16 18:15:47,11,3\n"
    )
    odd = (
        b'\xef\xbb\xbf"TIMESTAMP", ContextTokens ,GeneratedTokens\r\n\r\n'
        b'"2023-11-16 18:15:46.5","10", 2\r\n2023-11-16 18:15:47,11.0,3\r\n\r\n'
    )
    trace = read(tmp_path, "azure", odd)
    assert offsets_ns(trace) == offsets_ns(plain) == [0, 500_000_000]
    assert trace.prompt_tokens.tolist() == [10, 11]
    assert trace.output_tokens.tolist() == [2, 3]


def test_old_mac_line_ends_are_lines(tmp_path: Path) -> None:
    assert len(read(tmp_path, "csv", "arrival_s,prompt,output\r0,1,1\r1,1,1\r")) == 2


def test_extra_columns_may_hold_text_with_commas_and_line_ends(tmp_path: Path) -> None:
    text = 'note,output,prompt,arrival_s\n"a, b\nc",2,1,0\n"",4,3,1.5\n'
    trace = read(tmp_path, "csv", text)
    assert trace.prompt_tokens.tolist() == [1, 3]
    assert trace.output_tokens.tolist() == [2, 4]


def test_what_is_read_does_not_depend_on_chunks_and_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(i * 7 % 50 + i / 8, i + 1, i % 3) for i in range(200)]
    text = "arrival_s,prompt,output\n" + "".join(f"{a},{p},{o}\n" for a, p, o in rows)
    whole = read(tmp_path, "csv", text)
    monkeypatch.setattr(traces, "CHUNK_ROWS", 7)
    monkeypatch.setattr("kvasir_scenario.trace_files.BLOCK_BYTES", 11)
    pieces = read(tmp_path, "csv", text)
    assert offsets_ns(whole) == offsets_ns(pieces) == [round(a * 1e9) for a, _, _ in rows]
    assert pieces.prompt_tokens.tolist() == [p for _, p, _ in rows]
    assert pieces.output_tokens.tolist() == [o for _, _, o in rows]


def test_a_slice_is_half_open_in_the_traces_own_time(tmp_path: Path) -> None:
    text = "arrival_ms,prompt,output\n1000,1,1\n1500,1,1\n2000,1,1\n2500,1,1\n"
    times = read(tmp_path, "csv", text).times
    assert times.within(0.5, 1.5).tolist() == [False, True, True, False]
    assert times.within(0.5, None).tolist() == [False, True, True, True]
    assert times.arrival_ns(2, 0.5).tolist()[1:] == [0, 10**9, 2 * 10**9]


def test_fast_and_careful_date_times_agree() -> None:
    stamps = [
        "1969-12-31 23:59:59.999999999",
        "2199-12-31 23:59:59.000000001",
        "2024-02-29 12:00:00.5",
    ]
    place = trace_columns.Place(Path("t"), "c", lambda index: index)
    fast = trace_columns.timestamps(stamps, place)
    careful = trace_columns.timestamps([f"{stamp}Z" for stamp in stamps], place)
    assert fast.tolist() == careful.tolist()
    assert fast[0] == -1
