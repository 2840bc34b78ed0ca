"""The tables of a run, streamed to disk while it goes on: Parquet, and CSV where asked for.

The same rows give the same bytes: no time stamp, no host, one writer thread.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from kvasir_core.units import NANOS_PER_SECOND
from kvasir_scenario.run_dir import named_output, partial_path

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
ROW_GROUP_ROWS = 1 << 17  # Of tables written at once: 1 MB a column.


def _schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema(list(types.items()))


SECONDS, COUNT, INDEX = pa.float64(), pa.int32(), pa.int64()

REQUESTS = _schema(
    request_id=INDEX, arrival_s=SECONDS, prompt_tokens=COUNT, output_tokens=COUNT, queue_s=SECONDS,
    ttft_s=SECONDS, tpot_s=SECONDS, e2e_s=SECONDS, finish_reason=pa.string(), preemptions=COUNT,
)  # fmt: skip
MICRO_BATCHES = _schema(
    micro_batch_id=INDEX, composed_s=SECONDS, returned_s=SECONDS, rows=COUNT, prefill_rows=COUNT,
    decode_rows=COUNT, spans=COUNT, binding_limit=pa.string(),
)  # fmt: skip
STAGES = _schema(
    stage=COUNT, micro_batch_id=INDEX, received_s=SECONDS, start_s=SECONDS, end_s=SECONDS,
    sent_s=SECONDS,
)  # fmt: skip
SPANS = _schema(
    micro_batch_id=INDEX, request_id=INDEX, position=COUNT, rows=COUNT, is_decode=pa.bool_()
)  # Of some micro-batches, for the picture of the ring.
SAMPLES = _schema(at_s=SECONDS, waiting=COUNT, running=COUNT, kv_blocks_in_use=COUNT)

SWARM = _schema(
    at_s=SECONDS,
    waiting=COUNT,
    running=COUNT,
    is_engaged=pa.bool_(),
    is_recruiting=pa.bool_(),
    target=COUNT,
    claims=COUNT,
    workers_online=COUNT,
    workers_covering=COUNT,
    new=COUNT,
    trial=COUNT,
    proven=COUNT,
    suspect=COUNT,
    quarantined=COUNT,
    covered_share=SECONDS,
    target_share=SECONDS,
    downloads=COUNT,
    remote_share=SECONDS,
    tokens_per_s=SECONDS,
    tpot_s=SECONDS,
)  # Each row is the time since the row before; shares and TPOT are null where nothing happened.


# Columns are made from their buffers: `pa.array` would import pandas, a third of a second.


def numbers(values: npt.NDArray[Any], absent: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """A column of numbers or truth values; null where `absent`."""
    is_bits = values.dtype == np.bool_
    content = np.packbits(values, bitorder="little") if is_bits else np.ascontiguousarray(values)
    buffers = [_validity(absent), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), values.size, buffers)


def texts(values: Sequence[str], absent: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """A column of ASCII words; null where `absent`."""
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, values), np.int32, len(values)), out=offsets[1:])
    content = pa.py_buffer("".join(values).encode("ascii"))
    buffers = [_validity(absent), pa.py_buffer(offsets), content]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def _validity(absent: npt.NDArray[np.bool_] | None) -> pa.Buffer | None:
    return None if absent is None else pa.py_buffer(np.packbits(~absent, bitorder="little"))


def seconds(times_ns: Ints) -> pa.Array:
    """Nanoseconds as seconds; a negative time has not happened and is null."""
    absent = times_ns < 0
    return numbers(times_ns / NANOS_PER_SECOND, absent if absent.any() else None)


class TableWriter:
    """One table under its final name once closed; `path` is without a suffix.

    Raises:
        OutputError: In every method: the disk is full, or the like.
    """

    def __init__(self, path: Path, schema: pa.Schema, *, csv: bool = False) -> None:
        self.schema = schema
        self._targets = [path.with_name(f"{path.name}.parquet")]
        with named_output(self._targets[0]):
            self._parquet = pq.ParquetWriter(
                partial_path(self._targets[0]),
                schema,
                compression="snappy",  # A third of zstd's time for a tenth more bytes.
                use_dictionary=[field.name for field in schema if field.type == pa.string()],
                write_statistics=False,
                store_schema=False,
            )
        self._csv: Any = None
        if csv:
            self._targets.append(path.with_name(f"{path.name}.csv"))
            with named_output(self._targets[1]):
                self._csv = pc.CSVWriter(
                    partial_path(self._targets[1]),
                    schema,
                    write_options=pc.WriteOptions(quoting_style="needed"),
                )

    def write(self, columns: Sequence[pa.Array | npt.NDArray[Any]]) -> None:
        """Append rows, given as columns in the schema's order; they become one row group."""
        arrays = [column if isinstance(column, pa.Array) else numbers(column) for column in columns]
        batch = pa.record_batch(arrays, schema=self.schema)
        with named_output(self._targets[0]):
            self._parquet.write_batch(batch)
        if self._csv is not None:
            with named_output(self._targets[1]):
                self._csv.write(batch)

    def close(self) -> None:
        """Give the files their names."""
        for target, writer in zip(self._targets, (self._parquet, self._csv), strict=False):
            with named_output(target):
                writer.close()
        for target in self._targets:
            partial_path(target).replace(target)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
