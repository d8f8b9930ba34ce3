package target

import (
	"testing/fstest"

	"github.com/draftscope/draftscope/cuda"
)

// Weights is what OpenWeights takes.
type Weights = checkpoint

// OpenWeights opens a model of a config.json and weights that lie in no file.
func OpenWeights(config string, w Weights, dev cuda.Device) (*Model, error) {
	cfg, raw, err := readConfig(fstest.MapFS{"m/config.json": {Data: []byte(config)}}, "m")
	if err != nil {
		return nil, err
	}
	return openWeights(cfg, raw, w, dev)
}
