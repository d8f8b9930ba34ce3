//go:build !cgo

package query

import (
	"errors"
	"strings"
	"testing"
)

func TestWithoutCgoOpenSaysWhatIsMissing(t *testing.T) {
	_, err := Open(t.Context(), t.TempDir(), Options{})
	if !errors.Is(err, ErrNoDuckDB) || !strings.Contains(err.Error(), "CGO_ENABLED=1") {
		t.Errorf("error is %v, want ErrNoDuckDB", err)
	}
}
