package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
)

// writeJSON prints v for programs, indented for people.
func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// fingerprintOf hashes a model's configuration and weights' fingerprint.
func fingerprintOf(config []byte, weights string) string {
	sum := sha256.Sum256(append([]byte(weights), config...))
	return hex.EncodeToString(sum[:8])
}
