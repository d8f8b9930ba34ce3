package target

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/extract/safetensors"
)

// checkpoint is what is asked of weights: a [safetensors.Checkpoint].
type checkpoint interface {
	Names() []string
	Info(name string) (safetensors.Info, bool)
	Raw(name string) ([]byte, error)
	Float32s(name string) ([]float32, error)
	Fingerprint() string
	Close() error
}

// loader brings tensors to the device and keeps count of what was asked for,
// so that a checkpoint with more in it than the model uses is noticed.
type loader struct {
	dev     cuda.Device
	ckpt    checkpoint
	prefix  string // of everything but the head
	used    map[string]bool
	buffers []cuda.Buffer
	err     error // the first; later calls do nothing
}

func newLoader(dev cuda.Device, ckpt checkpoint) *loader {
	l := &loader{dev: dev, ckpt: ckpt, prefix: "model.", used: map[string]bool{}}
	if _, ok := ckpt.Info("model.language_model.embed_tokens.weight"); ok {
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

// mostPadding is by how many rows a vocabulary may be padded.
const mostPadding = 1024

// vocabulary is a matrix of a row a token, which engines pad to a multiple of
// something: the rows behind vocab_size are no tokens, and are left out.
func (l *loader) vocabulary(name string, rows, cols int) cuda.Tensor {
	stored := rows
	if info, ok := l.ckpt.Info(name); ok && len(info.Shape) == 2 && info.Shape[0] > rows && info.Shape[0] <= rows+mostPadding {
		stored = info.Shape[0]
	}
	return l.tensor(name, rows, cols, stored, cols)
}

func (l *loader) vector(name string, n int) cuda.Tensor {
	return l.tensor(l.prefix+name, 1, n, n)
}

// part is rows lo..hi-1 of a matrix of rows rows that the file holds; all of
// them where hi is 0.
type part struct {
	name         string
	rows, lo, hi int
}

// stack loads parts, which have cols columns, as one matrix.
func (l *loader) stack(cols int, parts ...part) cuda.Tensor {
	rows := 0
	for i := range parts {
		if p := &parts[i]; p.hi == 0 {
			p.hi = p.rows
		}
		rows += parts[i].hi - parts[i].lo
	}
	if l.err != nil {
		return cuda.Tensor{}
	}
	for _, p := range parts {
		if l.err = l.find(l.prefix+p.name, []int{p.rows, cols}); l.err != nil {
			return cuda.Tensor{}
		}
	}
	t, err := l.room(parts[0].name, rows, cols)
	at := 0
	for _, p := range parts {
		if err == nil {
			n := p.hi - p.lo
			err = l.bring(t.RowRange(at, at+n), l.prefix+p.name, p.lo*cols)
			at += n
		}
	}
	l.err = err
	return t
}

// load loads a whole tensor.
func (l *loader) load(name string, rows, cols int, shape []int) (cuda.Tensor, error) {
	if err := l.find(name, shape); err != nil {
		return cuda.Tensor{}, err
	}
	t, err := l.room(name, rows, cols)
	if err != nil {
		return t, err
	}
	return t, l.bring(t, name, 0)
}

// find checks that the file has a tensor and stores it as shape.
func (l *loader) find(name string, shape []int) error {
	info, ok := l.ckpt.Info(name)
	if !ok {
		return fmt.Errorf("%w: tensor %q is missing; download the model again, or correct its config.json", ErrModel, name)
	}
	l.used[name] = true
	if !slices.Equal(info.Shape, shape) {
		return fmt.Errorf("%w: tensor %q in %s has shape %v, config.json asks for %v", ErrModel, name, info.File, info.Shape, shape)
	}
	return nil
}

// room is device memory of the model's own.
func (l *loader) room(name string, rows, cols int) (cuda.Tensor, error) {
	buf, err := l.dev.New(rows * cols)
	if err != nil {
		return cuda.Tensor{}, fmt.Errorf("loading tensor %q: %w", name, err)
	}
	l.buffers = append(l.buffers, buf)
	return cuda.Matrix(buf, rows, cols), nil
}

// bring fills t with the values from value first of a tensor. The file's bytes
// go to the device as they are, but for F16.
func (l *loader) bring(t cuda.Tensor, name string, first int) error {
	info, _ := l.ckpt.Info(name)
	n := t.Rows * t.Cols
	as, raw := cuda.F32, info.DType == safetensors.F32
	if info.DType == safetensors.BF16 {
		as, raw = cuda.BF16, true
	}
	var err error
	if raw {
		var data []byte
		if data, err = l.ckpt.Raw(name); err == nil {
			err = l.dev.Load(t, data[first*as.Size():(first+n)*as.Size()], as)
		}
	} else {
		var values []float32
		if values, err = l.ckpt.Float32s(name); err == nil {
			err = l.dev.Upload(t, values[first:first+n])
		}
	}
	if err != nil {
		return fmt.Errorf("loading tensor %q: %w", name, err)
	}
	return nil
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
