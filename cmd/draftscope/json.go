package main

import (
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
