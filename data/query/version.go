package query

import (
	"context"
	"errors"
)

// Version is the version of DuckDB that answers, or an error wrapping
// [ErrNoDuckDB].
func Version(ctx context.Context) (version string, err error) {
	d, err := openEngine(ctx)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, d.close()) }()
	rows, err := d.query(ctx, "SELECT 'DuckDB ' || version()")
	if err != nil {
		return "", err
	}
	all, err := rows.All()
	if err != nil || len(all) == 0 {
		return "", err
	}
	return all[0][0].(string), nil
}
