package files

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"
)

// program writes pickles as torch.save does.
type program struct{ bytes.Buffer }

func (p *program) op(b ...byte) *program { p.Write(b); return p }

func (p *program) text(s string) *program {
	p.WriteByte('X')
	_ = binary.Write(p, binary.LittleEndian, uint32(len(s)))
	p.WriteString(s)
	return p
}

func (p *program) num(n int) *program {
	p.WriteByte('J')
	_ = binary.Write(p, binary.LittleEndian, int32(n))
	return p
}

func (p *program) global(module, name string) *program {
	p.WriteString("c" + module + "\n" + name + "\n")
	return p
}

func (p *program) ints(ns ...int) *program {
	p.op('(')
	for _, n := range ns {
		p.num(n)
	}
	return p.op('t')
}

// tensor pushes a tensor over a whole storage.
func (p *program) tensor(storage, key string, shape, stride []int) *program {
	n := 1
	for _, d := range shape {
		n *= d
	}
	p.global("torch._utils", "_rebuild_tensor_v2").op('(')
	p.op('(').text("storage").global("torch", storage).text(key).text("cpu").num(n).op('t', 'Q')
	p.num(0).ints(shape...).ints(stride...).op(0x89).global("collections", "OrderedDict").op(')', 'R')
	return p.op('t', 'R')
}

func dict(items func(p *program)) []byte {
	p := &program{}
	p.op(0x80, 2, '}', '(')
	items(p)
	p.op('u', '.')
	return p.Bytes()
}

// torchZip is a file of torch.save.
func torchZip(t testing.TB, pkl []byte, data map[string][]byte) []byte {
	t.Helper()
	var out bytes.Buffer
	z := zip.NewWriter(&out)
	add := func(name string, raw []byte) {
		w, err := z.Create("archive/" + name)
		if err == nil {
			_, err = w.Write(raw)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	add("data.pkl", pkl)
	add("byteorder", []byte("little"))
	for key, raw := range data {
		add("data/"+key, raw)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// goodCkpt is three tokens with two states of two bf16 values in one tensor.
func goodCkpt(t testing.TB) []byte {
	ids := make([]byte, 24)
	mask := make([]byte, 24)
	for i := range 3 {
		ids[8*i], mask[8*i] = byte(5+i), byte(min(i, 1))
	}
	states := make([]byte, 24)
	for i := range states {
		states[i] = byte(i)
	}
	return torchZip(t, dict(func(p *program) {
		p.text("input_ids").tensor("LongStorage", "0", []int{3}, []int{1})
		p.text("loss_mask").tensor("LongStorage", "1", []int{3}, []int{1})
		p.text("hidden_states").tensor("BFloat16Storage", "2", []int{1, 3, 4}, []int{12, 4, 1})
	}), map[string][]byte{"0": ids, "1": mask, "2": states})
}

func TestATorchFileIsReadWithoutPython(t *testing.T) {
	f, err := openTorch(goodCkpt(t))
	if err != nil {
		t.Fatal(err)
	}
	s, err := f.sample()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.check(), s.split(2)); err != nil {
		t.Fatal(err)
	}
	if s.Rows != 3 || s.Slots != 2 || s.IDs[2] != 7 || s.Mask[0] || !s.Mask[1] || s.Format.Name != "bf16" {
		t.Errorf("%+v", s)
	}
	if got := s.row(1, 2); !bytes.Equal(got, []byte{20, 21, 22, 23}) {
		t.Errorf("row 2 of slot 1 is %v", got)
	}
}

func TestAPickleThatWantsMoreThanTensorsIsNotObeyed(t *testing.T) {
	for name, tt := range map[string]struct {
		pkl  []byte
		says string
	}{
		"a call of the system":     {(&program{}).op(0x80, 2).global("posix", "system").op('(').text("true").op('t', 'R', '.').Bytes(), "posix.system"},
		"the same, by a stack":     {(&program{}).op(0x80, 4).text("os").text("system").op(0x93, '.').Bytes(), "os.system"},
		"another torch function":   {(&program{}).op(0x80, 2).global("torch.hub", "load").op('.').Bytes(), "torch.hub.load"},
		"a storage that is called": {(&program{}).op(0x80, 2).global("torch", "LongStorage").op(')', 'R', '.').Bytes(), "not executed"},
		"an object that is built":  {(&program{}).op(0x80, 2, '}', '}', 'b', '.').Bytes(), "operation 0x62"},
		"an instance":              {(&program{}).op(0x80, 2, '(', 'i', 'o', 's', '\n', 'x', '\n', '.').Bytes(), "operation 0x69"},
		"an empty stack":           {[]byte{0x80, 2, '.'}, "empty stack"},
		"no end":                   {[]byte{0x80, 2, '}'}, "ends in the middle"},
		"a text longer than it is": {[]byte{0x80, 2, 'X', 255, 255, 255, 255, 'a', '.'}, "ends in the middle"},
		"a tuple as a dict":        {[]byte{0x80, 2, ')', 'N', 'N', 's', '.'}, "no dict or list"},
		"memory it never had":      {[]byte{0x80, 2, 'h', 9, '.'}, "did not remember"},
		"protocol 5":               {[]byte{0x80, 5, '}', '.'}, "protocol 5"},
	} {
		t.Run(name, func(t *testing.T) {
			if v, err := unpickle(tt.pkl); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%v, %v; want %q", v, err, tt.says)
			}
		})
	}
}

func TestATensorThatReachesBeyondItsStorageIsRefused(t *testing.T) {
	good := func(p *program) { p.text("loss_mask").tensor("LongStorage", "1", []int{1}, []int{1}) }
	for name, items := range map[string]func(p *program){
		"strides with gaps":   func(p *program) { p.text("input_ids").tensor("LongStorage", "0", []int{2}, []int{2}) },
		"a negative shape":    func(p *program) { p.text("input_ids").tensor("LongStorage", "0", []int{-1}, []int{1}) },
		"more than is there":  func(p *program) { p.text("input_ids").tensor("LongStorage", "0", []int{9}, []int{1}) },
		"a path for a key":    func(p *program) { p.text("input_ids").tensor("LongStorage", "../0", []int{1}, []int{1}) },
		"no tensor":           func(p *program) { p.text("input_ids").num(3) },
		"a storage of floats": func(p *program) { p.text("input_ids").tensor("FloatStorage", "0", []int{1}, []int{1}) },
	} {
		t.Run(name, func(t *testing.T) {
			raw := torchZip(t, dict(func(p *program) { items(p); good(p) }), map[string][]byte{"0": make([]byte, 8), "1": make([]byte, 8)})
			f, err := openTorch(raw)
			if err == nil {
				_, err = f.sample()
			}
			if !errors.Is(err, ErrFormat) {
				t.Errorf("%v, want ErrFormat", err)
			}
		})
	}
}

func FuzzTorchFile(f *testing.F) {
	good := goodCkpt(f)
	f.Add(good)
	f.Add(good[:len(good)-10])
	f.Fuzz(func(t *testing.T, data []byte) {
		torch, err := openTorch(data)
		if err != nil {
			return
		}
		if s, err := torch.sample(); err == nil {
			_ = s.check()
		}
	})
}

func FuzzUnpickle(f *testing.F) {
	f.Add(dict(func(p *program) { p.text("a").tensor("LongStorage", "0", []int{1}, []int{1}) }))
	f.Add([]byte{0x80, 2, '}', 'q', 0, 'h', 0, '.'})
	f.Fuzz(func(_ *testing.T, data []byte) {
		_, _ = unpickle(data) // an error or a value, never a panic
	})
}
