package main

import (
	"context"
	"errors"
	"strings"

	"github.com/draftscope/draftscope/data/report"
)

// compareDrafters compares two drafters that were replayed over one capture.
func compareDrafters(ctx context.Context, ref, names string, asJSON bool, out streams) error {
	a, b, ok := strings.Cut(names, ",")
	if !ok || a == "" || b == "" || a == b || strings.Contains(b, ",") {
		return badUsage("--drafters wants the names of two drafters of the dataset, such as --drafters good,early")
	}
	c, err := captureOf(ref)
	if err != nil {
		return err
	}
	db, err := openDB(ctx, c.dir, out)
	if err != nil {
		return err
	}
	defer db.Close()
	v, err := report.CompareDrafters(ctx, db, c.run.Name, a, b, report.Options{Decode: decoder(c.dir, "")})
	switch {
	case errors.Is(err, report.ErrNoDrafter):
		return badInput(err)
	case err != nil:
		return err
	case asJSON:
		err = writeJSON(out.stdout, v)
	default:
		err = report.WriteVersus(out.stdout, v)
	}
	if err != nil {
		return err
	}
	return leftOut(db.Warnings())
}
