// Package interop holds the test that other programs read our Parquet files:
// pyarrow, polars and DuckDB for Python, the real libraries. It needs Python,
// so it stands behind the build tag interop: run it with `task test:interop`.
// result.txt is what it printed last.
package interop
