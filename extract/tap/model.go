package tap

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"

	"github.com/draftscope/draftscope/extract/target"
)

// sameModel compares what an engine says of its model with the target.
func sameModel(h Hello, m *target.Model) error {
	c := m.Config()
	var errs []error
	for _, x := range []struct {
		what       string
		has, wants int
	}{{"layers", h.Model.Layers, c.Layers}, {"hidden", h.Model.Hidden, c.Hidden}, {"vocabulary", h.Model.Vocab, c.Vocab}} {
		if x.has != x.wants {
			errs = append(errs, fmt.Errorf("%w: the engine's model has %s %d and the target %d; give the --target that the engine runs", ErrClaim, x.what, x.has, x.wants))
		}
	}
	if p := h.Model.Fingerprint; p != "" && p != m.Fingerprint() {
		errs = append(errs, fmt.Errorf("%w: the engine's model has the fingerprint %.12s and the target %.12s", ErrClaim, p, m.Fingerprint()))
	}
	if len(errs) == 0 && h.FinalNorm.SHA256 != "" {
		sum, err := normSum(m)
		if err != nil {
			return err
		}
		if sum != h.FinalNorm.SHA256 {
			errs = append(errs, fmt.Errorf("%w: the weights of the engine's final norm are not the target's; give the --target that the engine runs", ErrClaim))
		}
	}
	return errors.Join(errs...)
}

// normSum is the hash of the final norm's weights that a hello carries.
func normSum(m *target.Model) (string, error) {
	w, _, _ := m.FinalNorm()
	vals := make([]float32, w.Rows*w.Cols)
	if err := m.Device().Download(vals, w); err != nil {
		return "", fmt.Errorf("reading the final norm: %w", err)
	}
	var raw []byte
	for _, v := range vals {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v))
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:]), nil
}
