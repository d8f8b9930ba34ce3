"""Reads every NAME.parquet in a folder with pyarrow, polars and DuckDB, and
compares all columns, bit for bit, with NAME.json beside it."""

import json
import pathlib
import sys

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

COLUMNS = ["seq_id", "pos", "state", "norm", "vec"]


def bits(values):
    """The bits of float32 values, so that a NaN equals itself."""
    return np.ascontiguousarray(np.asarray(values, dtype=np.float32)).view(np.uint32)


def want_rows(path):
    want = json.loads(path.read_text())
    vec = np.frombuffer(bytes.fromhex(want["vec"]), dtype="<u4")
    norm = np.frombuffer(bytes.fromhex(want["norm"]), dtype="<u4")
    return want["seq_id"], want["pos"], want["state"], norm, vec, want["hidden"]


def check(table, want, where):
    seq, pos, state, norm, vec, hidden = want
    table = table.combine_chunks()
    assert table.column_names == COLUMNS, (where, table.column_names)
    assert table["seq_id"].to_pylist() == seq, where
    assert table["pos"].to_pylist() == pos, where
    assert table["state"].to_pylist() == state, where
    assert np.array_equal(bits(table["norm"].to_numpy()), norm), where
    assert pc.list_value_length(table["vec"]).to_pylist() == [hidden] * len(seq), where
    flat = pc.list_flatten(table["vec"]).to_numpy()
    assert np.array_equal(bits(flat), vec), where
    return len(seq)


def arrow(table):
    """Plain types: polars and DuckDB hand out large and view types."""
    return table.cast(pa.schema([
        ("seq_id", pa.string()), ("pos", pa.int32()), ("state", pa.int32()),
        ("norm", pa.float32()), ("vec", pa.list_(pa.float32())),
    ]))


def from_pyarrow(path, state=None):
    if state is not None:
        return arrow(ds.dataset(path, format="parquet").to_table(filter=ds.field("state") == state))
    table = pq.read_table(path, page_checksum_verification=True)
    assert table.schema.field("vec").type.value_type == pa.float32(), table.schema
    return arrow(table)


def from_polars(path, state=None):
    if state is not None:
        return arrow(pl.scan_parquet(path).filter(pl.col("state") == state).collect().to_arrow())
    frame = pl.read_parquet(path)
    assert frame.schema["vec"] == pl.List(pl.Float32), frame.schema
    return arrow(frame.to_arrow())


def from_duckdb(path, state=None):
    con = duckdb.connect()
    where = "" if state is None else f"where state = {state}"
    types = dict(con.execute(f"select column_name, column_type from (describe from '{path}')").fetchall())
    assert types["vec"] == "FLOAT[]", types
    return arrow(con.sql(f"select * from '{path}' {where}").to_arrow_table())


def filtered(want, state):
    seq, pos, st, norm, vec, hidden = want
    keep = [i for i, s in enumerate(st) if s == state]
    return ([seq[i] for i in keep], [pos[i] for i in keep], [st[i] for i in keep], norm[keep],
            vec.reshape(-1, hidden)[keep].reshape(-1), hidden)


READERS = {"pyarrow": from_pyarrow, "polars": from_polars, "duckdb": from_duckdb}


def main(folder):
    print(f"pyarrow {pa.__version__}, polars {pl.__version__}, duckdb {duckdb.__version__}")
    for path in sorted(pathlib.Path(folder).glob("*.parquet")):
        want = want_rows(path.with_suffix(".json"))
        rows = 0
        for name, read in READERS.items():
            rows = check(read(str(path)), want, (path.name, name))
            for state in sorted(set(want[2])):
                check(read(str(path), state), filtered(want, state), (path.name, name, state))
        print(f"{path.stem}: {rows} rows; {', '.join(READERS)} equal in all columns, and one state at a time")


main(sys.argv[1])
