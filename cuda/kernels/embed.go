//go:build cuda && cgo

package kernels

import (
	"embed"
	"fmt"
)

//go:embed *.ptx
var images embed.FS

// PTX is the code of a kernel's file, by the file's name without extension.
func PTX(name string) ([]byte, error) {
	text, err := images.ReadFile(name + ".ptx")
	if err != nil {
		return nil, fmt.Errorf("finding kernels %s: %w", name, err)
	}
	return text, nil
}
