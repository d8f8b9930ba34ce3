package target

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/extract/safetensors"
)

// loader brings tensors to the device and keeps count of what was asked for,
// so that a checkpoint with more in it than the model uses is noticed.
type loader struct {
	dev     cuda.Device
	ckpt    *safetensors.Checkpoint
	prefix  string // of everything but the head
	used    map[string]bool
	buffers []cuda.Buffer
	err     error // the first; later calls do nothing
}

func newLoader(dev cuda.Device, ckpt *safetensors.Checkpoint) *loader {
	l := &loader{dev: dev, ckpt: ckpt, prefix: "model.", used: map[string]bool{}}
	if _, ok := ckpt.Shape("model.language_model.embed_tokens.weight"); ok {
		l.prefix = "model.language_model." // a multimodal checkpoint
	}
	return l
}

// tensor loads a tensor that the file stores as shape and views it as
// rows x cols.
func (l *loader) tensor(name string, rows, cols int, shape ...int) cuda.Tensor {
	if l.err != nil {
		return cuda.Tensor{}
	}
	t, err := l.load(name, rows, cols, shape)
	if err != nil {
		l.err = err
	}
	return t
}

func (l *loader) matrix(name string, rows, cols int) cuda.Tensor {
	return l.tensor(l.prefix+name, rows, cols, rows, cols)
}

func (l *loader) vector(name string, n int) cuda.Tensor {
	return l.tensor(l.prefix+name, 1, n, n)
}

func (l *loader) load(name string, rows, cols int, shape []int) (cuda.Tensor, error) {
	info, ok := l.ckpt.Info(name)
	if !ok {
		return cuda.Tensor{}, fmt.Errorf("%w: tensor %q is missing; download the model again, or correct its config.json", ErrModel, name)
	}
	l.used[name] = true
	if !slices.Equal(info.Shape, shape) {
		return cuda.Tensor{}, fmt.Errorf("%w: tensor %q in %s has shape %v, config.json asks for %v", ErrModel, name, info.File, info.Shape, shape)
	}
	vals, err := l.ckpt.Float32s(name)
	if err != nil {
		return cuda.Tensor{}, err
	}
	buf, err := l.dev.New(len(vals))
	if err != nil {
		return cuda.Tensor{}, fmt.Errorf("loading tensor %q: %w", name, err)
	}
	l.buffers = append(l.buffers, buf)
	t := cuda.Matrix(buf, rows, cols)
	if err := l.dev.Upload(t, vals); err != nil {
		return cuda.Tensor{}, fmt.Errorf("loading tensor %q: %w", name, err)
	}
	return t, nil
}

// skip marks a tensor as known and not needed.
func (l *loader) skip(name string) { l.used[name] = true }

// finish reports the first error, or the tensors that nothing used.
func (l *loader) finish() error {
	if l.err != nil {
		return l.err
	}
	var extra []string
	for _, name := range l.ckpt.Names() {
		if !l.used[name] && !ignored(name) {
			extra = append(extra, name)
		}
	}
	if len(extra) == 0 {
		return nil
	}
	more := ""
	if n := len(extra) - 3; n > 0 {
		more = fmt.Sprintf(" and %d more", n)
		extra = extra[:3]
	}
	return fmt.Errorf("%w: the checkpoint holds %s%s, which a model of its config.json does not have; it may be of another architecture", ErrModel, strings.Join(extra, ", "), more)
}

// ignored are tensors beside the text model: the multi-token prediction
// layers, the vision tower, and frequencies that old exports wrote out.
func ignored(name string) bool {
	return strings.HasPrefix(name, "mtp.") || strings.HasPrefix(name, "model.visual.") || strings.HasSuffix(name, ".rotary_emb.inv_freq")
}

func (l *loader) close() {
	for _, b := range l.buffers {
		b.Close()
	}
	l.buffers = nil
}

var errClosed = errors.New("the model is closed")
