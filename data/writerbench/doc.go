// Package writerbench measures the writer of the states files against the
// writers of parquet-go and of arrow, all in one run. It is a module of its
// own: nothing else needs arrow's Parquet, and arrow v17's and that of
// DuckDB's Go driver define the same symbols and cannot be linked together.
package writerbench
