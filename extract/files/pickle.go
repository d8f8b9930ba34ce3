package files

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

// A pickle is a program, and what it may do in Python is anything. The one
// that torch.save writes for a dict of tensors needs little; this machine
// knows that little, builds values, and calls nothing. Whatever else stands in
// a file is an error that names it.

// storage is a typed piece of a torch file.
type storage struct {
	dtype string // of torch: BFloat16Storage, LongStorage, ...
	key   string // its name under data/
	size  int64  // values
}

// tensor is a view of a storage.
type tensor struct {
	storage storage
	offset  int64
	shape   []int64
	stride  []int64
}

// global is a name that the pickle mentions; it is never resolved.
type global string

const (
	rebuildTensor = global("torch._utils _rebuild_tensor_v2")
	orderedDict   = global("collections OrderedDict")
)

// allowed are the globals that a file of tensors may mention.
var allowed = map[global]bool{
	rebuildTensor: true, orderedDict: true,
	"torch FloatStorage": true, "torch HalfStorage": true, "torch BFloat16Storage": true, "torch LongStorage": true,
	"torch IntStorage": true, "torch ShortStorage": true, "torch CharStorage": true, "torch ByteStorage": true, "torch BoolStorage": true,
}

type mark struct{}

// maxPickle bounds the work: a file of tensors has a few hundred operations.
const maxPickle = 1 << 20

type pickle struct {
	in    []byte
	at    int
	stack []any
	memo  map[int]any
}

func badPickle(format string, args ...any) error {
	return fmt.Errorf("%w: its pickle %s", ErrFormat, fmt.Sprintf(format, args...))
}

// unpickle runs the program and returns the value that it builds.
func unpickle(in []byte) (any, error) {
	if len(in) > maxPickle {
		return nil, badPickle("has %d bytes; a few tensors take %d at most", len(in), maxPickle)
	}
	p := &pickle{in: in, memo: map[int]any{}}
	for {
		op, err := p.take(1)
		if err != nil {
			return nil, err
		}
		if op[0] == '.' {
			return p.pop()
		}
		if err := p.do(op[0]); err != nil {
			return nil, err
		}
	}
}

func (p *pickle) take(n int) ([]byte, error) {
	if n < 0 || n > len(p.in)-p.at {
		return nil, badPickle("ends in the middle")
	}
	b := p.in[p.at : p.at+n]
	p.at += n
	return b, nil
}

func (p *pickle) line() (string, error) {
	for i := p.at; i < len(p.in); i++ {
		if p.in[i] == '\n' {
			s := string(p.in[p.at:i])
			p.at = i + 1
			return s, nil
		}
	}
	return "", badPickle("ends in the middle")
}

// number reads n bytes, little-endian.
func (p *pickle) number(n int) (int, error) {
	b, err := p.take(n)
	if err != nil {
		return 0, err
	}
	var wide [8]byte
	copy(wide[:], b)
	return int(binary.LittleEndian.Uint64(wide[:])), nil
}

func (p *pickle) push(v any) { p.stack = append(p.stack, v) }

func (p *pickle) pop() (any, error) {
	if len(p.stack) == 0 {
		return nil, badPickle("takes from an empty stack")
	}
	v := p.stack[len(p.stack)-1]
	p.stack = p.stack[:len(p.stack)-1]
	return v, nil
}

// toMark pops everything down to the last mark.
func (p *pickle) toMark() ([]any, error) {
	for i, v := range slices.Backward(p.stack) {
		if _, ok := v.(mark); ok {
			items := append([]any(nil), p.stack[i+1:]...)
			p.stack = p.stack[:i]
			return items, nil
		}
	}
	return nil, badPickle("has no mark where it needs one")
}

// popN pops n values, first pushed first.
func (p *pickle) popN(n int) ([]any, error) {
	if n > len(p.stack) {
		return nil, badPickle("takes from an empty stack")
	}
	items := append([]any(nil), p.stack[len(p.stack)-n:]...)
	p.stack = p.stack[:len(p.stack)-n]
	return items, nil
}

func (p *pickle) text(size int) error {
	n, err := p.number(size)
	if err != nil {
		return err
	}
	b, err := p.take(n)
	p.push(string(b))
	return err
}

func (p *pickle) integer(size int, signed bool) error {
	n, err := p.number(size)
	if signed {
		n = int(int32(n))
	}
	p.push(int64(n))
	return err
}

func (p *pickle) do(op byte) error {
	switch op {
	case 0x80: // PROTO
		v, err := p.number(1)
		if err == nil && (v < 2 || v > 4) {
			return badPickle("is of protocol %d; 2 to 4 are read", v)
		}
		return err
	case 0x95: // FRAME
		_, err := p.take(8)
		return err
	case '}': // EMPTY_DICT
		p.push(map[string]any{})
	case ']': // EMPTY_LIST
		p.push(&[]any{})
	case ')': // EMPTY_TUPLE
		p.push([]any{})
	case '(':
		p.push(mark{})
	case 'N':
		p.push(nil)
	case 0x88:
		p.push(true)
	case 0x89:
		p.push(false)
	case 'X': // BINUNICODE
		return p.text(4)
	case 0x8c: // SHORT_BINUNICODE
		return p.text(1)
	case 'J': // BININT
		return p.integer(4, true)
	case 'K': // BININT1
		return p.integer(1, false)
	case 'M': // BININT2
		return p.integer(2, false)
	case 0x8a: // LONG1
		return p.long()
	case 'G': // BINFLOAT
		b, err := p.take(8)
		if err == nil {
			p.push(math.Float64frombits(binary.BigEndian.Uint64(b)))
		}
		return err
	case 't', 0x85, 0x86, 0x87:
		return p.tuple(op)
	case 'q', 'r', 0x94:
		return p.remember(op)
	case 'h', 'j':
		return p.recall(op)
	case 's', 'u', 'a', 'e':
		return p.fill(op)
	case 'c': // GLOBAL
		module, err := p.line()
		if err != nil {
			return err
		}
		name, err := p.line()
		if err != nil {
			return err
		}
		return p.global(module, name)
	case 0x93: // STACK_GLOBAL
		names, err := p.popN(2)
		if err != nil {
			return err
		}
		module, _ := names[0].(string)
		name, _ := names[1].(string)
		return p.global(module, name)
	case 'Q': // BINPERSID
		return p.persistent()
	case 'R': // REDUCE
		return p.reduce()
	default:
		return badPickle("has operation 0x%02x at byte %d, which a file of tensors does not need; it is not executed", op, p.at-1)
	}
	return nil
}

func (p *pickle) long() error {
	n, err := p.number(1)
	if err != nil {
		return err
	}
	b, err := p.take(n)
	if err != nil {
		return err
	}
	if n > 8 {
		return badPickle("has a number of %d bytes", n)
	}
	var wide [8]byte
	if n > 0 && b[n-1]&0x80 != 0 {
		wide = [8]byte{255, 255, 255, 255, 255, 255, 255, 255}
	}
	copy(wide[:], b)
	p.push(int64(binary.LittleEndian.Uint64(wide[:])))
	return nil
}

func (p *pickle) tuple(op byte) (err error) {
	var items []any
	if op == 't' {
		items, err = p.toMark()
	} else {
		items, err = p.popN(int(op - 0x84))
	}
	p.push(items)
	return err
}

func (p *pickle) remember(op byte) (err error) {
	key := len(p.memo) // MEMOIZE
	switch op {
	case 'q':
		key, err = p.number(1)
	case 'r':
		key, err = p.number(4)
	}
	if err == nil && len(p.stack) == 0 {
		err = badPickle("takes from an empty stack")
	}
	if err == nil {
		p.memo[key] = p.stack[len(p.stack)-1]
	}
	return err
}

func (p *pickle) recall(op byte) error {
	size := 1
	if op == 'j' {
		size = 4
	}
	key, err := p.number(size)
	if err != nil {
		return err
	}
	v, ok := p.memo[key]
	if !ok {
		return badPickle("recalls what it did not remember")
	}
	p.push(v)
	return nil
}

// fill puts items into the dict or list below them.
func (p *pickle) fill(op byte) (err error) {
	var items []any
	switch op {
	case 's':
		items, err = p.popN(2)
	case 'a':
		items, err = p.popN(1)
	default:
		items, err = p.toMark()
	}
	if err != nil {
		return err
	}
	if len(p.stack) == 0 {
		return badPickle("takes from an empty stack")
	}
	switch into := p.stack[len(p.stack)-1].(type) {
	case map[string]any:
		if op != 's' && op != 'u' || len(items)%2 != 0 {
			break
		}
		for i := 0; i < len(items); i += 2 {
			key, ok := items[i].(string)
			if !ok {
				return badPickle("has a dict whose key is no text")
			}
			into[key] = items[i+1]
		}
		return nil
	case *[]any:
		if op == 'a' || op == 'e' {
			*into = append(*into, items...)
			return nil
		}
	}
	return badPickle("fills what is no dict or list")
}

func (p *pickle) global(module, name string) error {
	g := global(module + " " + name)
	if !allowed[g] {
		return badPickle("asks for %.100q, which a file of tensors does not need; it is not executed", module+"."+name)
	}
	p.push(g)
	return nil
}

// persistent makes a storage of ("storage", type, key, place, size).
func (p *pickle) persistent() error {
	v, err := p.pop()
	if err != nil {
		return err
	}
	t, ok := v.([]any)
	if !ok || len(t) != 5 || t[0] != "storage" {
		return badPickle("has a reference that is no storage")
	}
	dtype, ok1 := t[1].(global)
	key, ok2 := t[2].(string)
	size, ok3 := t[4].(int64)
	if !ok1 || !ok2 || !ok3 || size < 0 {
		return badPickle("has a storage without type, key or size")
	}
	p.push(storage{string(dtype), key, size})
	return nil
}

// reduce makes a tensor, or the empty dict of its hooks; it calls nothing.
func (p *pickle) reduce() error {
	call, err := p.popN(2)
	if err != nil {
		return err
	}
	args, ok := call[1].([]any)
	switch {
	case !ok:
	case call[0] == orderedDict && len(args) == 0:
		p.push(map[string]any{})
		return nil
	case call[0] == rebuildTensor && len(args) >= 4:
		st, ok1 := args[0].(storage)
		offset, ok2 := args[1].(int64)
		shape, ok3 := ints(args[2])
		stride, ok4 := ints(args[3])
		if !ok1 || !ok2 || !ok3 || !ok4 || len(shape) != len(stride) {
			return badPickle("has a tensor without storage, offset, shape or strides")
		}
		p.push(tensor{st, offset, shape, stride})
		return nil
	}
	return badPickle("calls what a file of tensors does not need; it is not executed")
}

func ints(v any) ([]int64, bool) {
	t, ok := v.([]any)
	var out []int64
	for _, x := range t {
		n, isInt := x.(int64)
		ok = ok && isInt
		out = append(out, n)
	}
	return out, ok
}
