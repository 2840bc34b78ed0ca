"""Wrong trace files: each error names file, line, column and value, and says what is right."""

import gzip
from pathlib import Path

import pytest

from kvasir_core.errors import ScenarioError
from kvasir_scenario import trace_files, traces
from kvasir_scenario.traces import TraceFormat, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n0,m,1,1,2,x\n"
PLAIN = "arrival_s,prompt,output\n0,1,1\n"
MOON = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'


def refusal(tmp_path: Path, kind: TraceFormat, data: str | bytes) -> str:
    path = tmp_path / "trace.txt"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ScenarioError) as caught:
        read_trace(path, kind)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


@pytest.mark.parametrize(
    "value",
    ["0", "-1", "x", "", "nan", "inf", "1.5", "2147483649", "1_000", "٣", "1e400", "9" * 70],
)
@pytest.mark.parametrize(
    ("kind", "start", "row"),
    [
        ("azure", AZURE, "2023-11-16 18:15:47,{},1\n"),
        ("burstgpt", BURST, "1,m,{},1,2,x\n"),
        ("csv", PLAIN, "1,{},1\n"),
    ],
)  # fmt: skip
def test_a_wrong_prompt_length_names_line_column_and_value(
    tmp_path: Path, kind: TraceFormat, start: str, row: str, value: str
) -> None:
    message = refusal(tmp_path, kind, start + "\n" + row.format(value))
    column = {"azure": "ContextTokens", "burstgpt": "Request tokens", "csv": "prompt"}[kind]
    assert message.startswith(f":4: column '{column}', value '{value}'"[:60])
    assert "whole number from 1 to 2147483648" in message


@pytest.mark.parametrize("value", ["-1", "x", "2147483649"])
def test_a_wrong_output_length_names_line_column_and_value(tmp_path: Path, value: str) -> None:
    message = refusal(tmp_path, "csv", f"{PLAIN}1,1,{value}\n")
    assert message.startswith(f":3: column 'output', value '{value}'")
    assert "from 0" in message


@pytest.mark.parametrize(
    "value", ["-1", "-0.5", "x", "", "nan", "inf", "-inf", "1e400", "1_0", "0x1", "1e99", "9" * 30]
)
def test_a_wrong_time_names_line_column_and_value(tmp_path: Path, value: str) -> None:
    message = refusal(tmp_path, "csv", f"{PLAIN}{value},1,1\n")
    assert message.startswith(f":3: column 'arrival_s', value '{value}'")


@pytest.mark.parametrize(
    "value",
    [
        "now", "2023-11-16", "2023-11-16 18:15", "2023-13-16 18:15:46", "2023-11-16 18:15:60", "12",
        "2023-11-16 18:15:46.1234567890", "0001-01-01 00:00:00", "9999-01-01 00:00:00", "NaT", "",
        "2023-11-16 18:15:46-05", "2023-11-16 18:15:46 PM",
    ],
)  # fmt: skip
def test_a_wrong_date_time_names_line_column_and_value(tmp_path: Path, value: str) -> None:
    message = refusal(tmp_path, "azure", f"{AZURE}{value},1,1\n")
    assert message.startswith(f":3: column 'TIMESTAMP', value '{value}'")


def test_lines_are_counted_past_quoted_line_ends_and_blank_lines(tmp_path: Path) -> None:
    text = 'note,arrival_s,prompt,output\n"a\nb",0,1,1\n\n"c\n\nd",1,1,1\n,2,zero,1\n'
    assert refusal(tmp_path, "csv", text).startswith(":8: column 'prompt', value 'zero'")


def test_lines_are_counted_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "CHUNK_ROWS", 3)
    monkeypatch.setattr(trace_files, "BLOCK_BYTES", 5)
    rows = "".join(f"{i},1,{'-' if i == 71 else 1}\n" for i in range(100))
    assert refusal(tmp_path, "csv", "arrival_s,prompt,output\n" + rows).startswith(
        ":73: column 'output'"
    )


@pytest.mark.parametrize("row", ["1,2\n", "1,2,3,4\n", "1\n"])
def test_a_row_of_another_width_names_its_line(tmp_path: Path, row: str) -> None:
    message = refusal(tmp_path, "csv", PLAIN + row)
    assert message.startswith(":3: value ")
    assert f"has {row.count(',') + 1} fields where the header has 3" in message


def test_a_missing_column_names_what_is_there(tmp_path: Path) -> None:
    message = refusal(tmp_path, "azure", "TIMESTAMP,ContextTokens,Generated\nx,1,1\n")
    assert "'GeneratedTokens'" in message
    assert "TIMESTAMP,ContextTokens,Generated'" in message
    assert "workload.columns.prompt" in refusal(tmp_path, "csv", "arrival,in,out\n0,1,1\n")
    assert refusal(tmp_path, "csv", "0,1,1\n1,1,1\n").startswith(":1: ")


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, "csv", "arrival_s,prompt,prompt,output\n0,1,1,1\n")
    assert "2 columns are called 'prompt'" in message
    assert "2 columns" in refusal(tmp_path, "csv", "arrival_s,arrival_ms,prompt,output\n0,1,1,1\n")


def test_a_header_without_rows_is_refused(tmp_path: Path) -> None:
    assert "no request" in refusal(tmp_path, "csv", "arrival_s,prompt,output\n\n")
    assert "holds no request" in refusal(tmp_path, "mooncake", "\n" * 100)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"timestamp": 1, "input_length": 1, "output_le', "not a whole JSON object"),
        ("[" * 100_000, "not a whole JSON object"),
        ("[1, 2]", "not a JSON object"),
        ('{"timestamp": 1, "input_length": 1}', "no 'output_length'"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "column 'input_length', value '0'"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "column 'timestamp', value 'nan'"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}', "column 'input_length', value 'True'"),
        ('{"timestamp": 1, "input_length": "5", "output_length": 1}', "column 'input_length'"),
        ('{"timestamp": 1, "input_length": 1, "output_length": null}', "column 'output_length', value 'None'"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1.5]}', "column 'hash_ids'"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [true]}', "column 'hash_ids'"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": "7"}', "column 'hash_ids'"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [9223372036854775808]}', "63 bits"),
    ],
)  # fmt: skip
def test_a_wrong_json_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    message = refusal(tmp_path, "mooncake", MOON + line)
    assert message.startswith(":2: ")
    assert told in message


def test_broken_quoting_is_refused_not_swallowed(tmp_path: Path) -> None:
    for bad in ('1,"1,1\n2,1,1\n', '1,"1"x,1\n', f'1,"{"x" * 200_000}",1\n'):
        assert "is not CSV" in refusal(tmp_path, "csv", PLAIN + bad)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "holds no request"),
        (b"\xef\xbb\xbf", "holds no request"),
        (b"\xef\xbb\xbf\n\n", "holds no request"),
        (gzip.compress(AZURE.encode(), mtime=0), "gunzip"),
        (b"PK\x03\x04rest", "zip"),
        (AZURE.encode("utf-16"), "UTF-16"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<!DOCTYPE html>", "HTML"),
        (AZURE.encode() + b"2023-11-16 18:15:47,\xff,1\n", ":3: value b'\\xff"),
    ],
)
def test_what_is_not_a_text_trace_is_told_apart(tmp_path: Path, data: bytes, told: str) -> None:
    assert told in refusal(tmp_path, "azure", data)


def test_paths_that_are_no_files_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", Path("/dev/zero"), tmp_path / "a\0b"):
        with pytest.raises(ScenarioError, match=r"workload\.path"):
            read_trace(path, "csv")


def test_limits_hold_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "huge.csv"
    with path.open("wb") as file:
        file.write(PLAIN.encode())
        file.truncate((2 << 30) + 1)  # Sparse: takes no disk.
    with pytest.raises(ScenarioError, match="at most 2147483648"):
        read_trace(path, "csv")
    long = PLAIN.encode() + b"1," + b"1" * ((1 << 20) + 1)
    for end in (b",1\n", b""):
        assert refusal(tmp_path, "csv", long + end).startswith(":3: is longer than 1048576")
    monkeypatch.setattr(traces, "ROWS_MAX", 2)
    assert "more than 2 requests" in refusal(tmp_path, "csv", PLAIN + "1,1,1\n2,1,1\n")
    monkeypatch.setattr(traces, "HASHES_MAX", 2)
    row = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1, 2, 3]}'
    assert refusal(tmp_path, "mooncake", row).startswith(":1: has more than 2 prefix hashes")


def test_a_span_beyond_the_clock_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival,prompt,output\n0,1,1\n9000000000,1,1\n")
    with pytest.raises(ScenarioError, match=r"column 'arrival'.*time_unit"):
        read_trace(path, "csv", time_unit="s")
